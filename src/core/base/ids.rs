//! Dense ids: the names of a configuration as indexes into arrays.
//!
//! The request path uses only ids, so a lookup is an array access and never hashes a string. Names
//! are for configuration, metric labels and log lines. An id is valid only for the array for which
//! it was made.

use std::fmt;

macro_rules! dense_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u16);

        impl $name {
            /// The id for position `index`.
            ///
            /// # Panics
            /// If `index` does not fit 16 bits. The configuration bounds every table far below
            /// that.
            pub fn new(index: usize) -> Self {
                Self(u16::try_from(index).expect("dense id tables are bounded well below 65536"))
            }

            /// The position in the table that this id indexes.
            #[inline]
            pub fn index(self) -> usize {
                usize::from(self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "#{}", self.0)
            }
        }
    };
}

dense_id!(
    /// A pool: backends that may serve the same requests.
    PoolId
);
dense_id!(
    /// One vLLM server.
    BackendId
);
dense_id!(
    /// A model name that clients may send (LoRA adapters are models too).
    ModelId
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_returns_the_index_it_was_made_of() {
        assert_eq!(PoolId::new(7).index(), 7);
        assert_eq!(BackendId::new(65_535).index(), 65_535);
    }

    #[test]
    #[should_panic(expected = "bounded")]
    fn an_index_that_does_not_fit_is_a_bug() {
        ModelId::new(65_536);
    }
}
