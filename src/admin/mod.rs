//! tmp
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::watch;
/// t
pub trait Control: Send + Sync {}
/// t
pub struct Socket(SocketAddr);
/// t
pub async fn bind(a: SocketAddr) -> Result<Socket, crate::proxy::ListenError> {
    Ok(Socket(a))
}
impl Socket {
    /// t
    pub fn address(&self) -> SocketAddr {
        self.0
    }
    /// t
    pub async fn serve(self, _c: Arc<dyn Control>, mut end: watch::Receiver<bool>) {
        let _ = end.wait_for(|e| *e).await;
    }
}
impl Control for crate::serve::House {}
