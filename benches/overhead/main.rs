//! Tools with which `benches/overhead/run` compares the overhead of proxies. They are in one
//! executable, so that only one must be linked:
//!
//! - `engine`: responds like vLLM, at minimal cost, at the pace set by the request (`engine.rs`)
//! - `load`: closed-loop client that times the first content and the whole response (`load.rs`)
//! - `bare`: a proxy of pingora's `HttpServerApp`, without the gateway's work (`bare.rs`)
//!
//! Without a command, as `cargo bench` starts it, the program only names `benches/overhead/run`.

mod bare;
mod engine;
mod load;
mod reply;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "tools of the side-by-side overhead measurement")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Passed by `cargo bench`; means nothing here.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Mock engine: vLLM's responses at the pace set by the request.
    Engine {
        /// Address to listen on.
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: String,
    },
    /// Closed-loop load; prints one line of JSON.
    Load(load::Load),
    /// Bare pingora `HttpServerApp` in front of one backend.
    Bare {
        /// Address to listen on.
        #[arg(long)]
        listen: String,
        /// `host:port` of the backend.
        #[arg(long)]
        backend: String,
        /// Threads that serve.
        #[arg(long, default_value_t = 2)]
        threads: usize,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Some(Command::Engine { listen }) => run(engine::listen_and_serve(&listen)),
        Some(Command::Load(load)) => run(load::run(load)),
        Some(Command::Bare { listen, backend, threads }) => {
            bare::run(&listen, &backend, threads);
            Ok(())
        }
        None => {
            eprintln!("the measurement is started by benches/overhead/run; --help shows its parts");
            Ok(())
        }
    }
}

/// Runs `work` on one thread, so that the other cores are free for the measured proxy.
fn run(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}
