//! A macro for enums whose variants have a name outside the program.
//!
//! One table has the variants and their names in messages, metrics, journals and the admin API, so
//! no list can lack a variant.

/// Declares an enum with `ALL` (the variants in the order of declaration) and `label` (the name of
/// a variant).
#[macro_export]
macro_rules! labels {
    ($(#[$attribute:meta])* $vis:vis enum $name:ident {
        $($(#[$inner:meta])* $variant:ident = $label:literal,)+
    }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name {
            $($(#[$inner])* $variant,)+
        }

        impl $name {
            /// Every variant, in the order of declaration.
            pub const ALL: [Self; [$($label),+].len()] = [$(Self::$variant),+];

            /// The name in messages, metrics, journals and the admin API.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }
        }
    };
}
