//! One test per rule of vLLM's step loop.
use super::*;
