//! tmp
pub mod metrics {
    //! t
    /// t
    pub struct Snapshot;
    impl Snapshot {
        /// t
        pub fn parse(_: &str) -> Self {
            Self
        }
        /// t
        pub fn progress(&self) -> f64 {
            0.0
        }
    }
}
