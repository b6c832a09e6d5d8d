//! `table!`: a table of the configuration, declared once.
//!
//! ```text
//! table! {
//!     /// How often a request may be tried.
//!     pub struct Retry {
//!         /// Attempts per request, the first included.
//!         pub attempts: u32 = default("2").within("1", "8");
//!     }
//! }
//! ```
//!
//! This declares the struct and generates the code that reads, shows, compares and documents it.
//! The doc comment of a field is also the key's documentation in the reference file. If a key has
//! another name than its field, write `field as "key": type`. A type that is not a plain struct (a
//! backend) wraps a struct that is declared this way.

use super::file::{Entry, Table, Value};
use super::key::{Fallback, Field, KeySpec, Shape};
use super::origin::Origin;
use super::problem::{Situation, Suggestion};
use super::report::{Place, Report};
use super::setting::{Setting, join, wrong_type};

macro_rules! table {
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $key:literal) => { $key };
    ($(#[$attribute:meta])* $vis:vis struct $name:ident {
        $($(#[doc = $doc:literal])* $field_vis:vis $field:ident $(as $key:literal)?: $type:ty = $definition:expr;)+
    }) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $name {
            $($(#[doc = $doc])* $field_vis $field: $type,)+
        }

        impl $name {
            /// The definitions of the keys.
            pub(super) const FIELDS: &'static [$crate::key::Field] = {
                #[allow(unused_imports, reason = "each table uses some of them")]
                use $crate::key::*;
                &[$(Field {
                    key: $definition.of_field(table!(@name $field $($key)?), &[$($doc),*]),
                    shape: <$type as $crate::setting::Setting>::SHAPE,
                },)+]
            };
        }

        impl $crate::setting::Setting for $name {
            const SHAPE: $crate::key::Shape = $crate::key::Shape::Table(Self::FIELDS);

            fn read(
                written: &$crate::file::Entry,
                place: &$crate::report::Place,
                _: &$crate::key::KeySpec,
                report: &mut $crate::report::Report<'_>,
            ) -> Option<Self> {
                let table = $crate::table::open(written, place, Self::FIELDS, report)?;
                let mut fields = Self::FIELDS.iter();
                $(let $field = $crate::table::field(table, place, &fields.next()?.key, report);)+
                Some(Self { $($field: $field?,)+ })
            }

            fn show(&self, names: &$crate::report::Names) -> $crate::setting::Shown {
                let values = vec![$(self.$field.show(names)),+];
                $crate::setting::Shown::Table($crate::setting::ShownTable::new(Self::FIELDS, values))
            }

            fn keep_running(&mut self, running: &Self) {
                let mut fields = Self::FIELDS.iter();
                $(if fields.next().is_some_and(|field| field.key.applied == $crate::key::Applied::AfterRestart) {
                    self.$field.clone_from(&running.$field);
                } else {
                    self.$field.keep_running(&running.$field);
                })+
            }
        }
    };
}
pub(super) use table;

/// The table as written in the file. Reports unknown keys.
pub(super) fn open<'w>(
    written: &'w Entry,
    place: &Place,
    fields: &'static [Field],
    report: &mut Report<'_>,
) -> Option<&'w Table> {
    let known = || fields.iter().map(|field| field.key.name);
    let Value::Table(table) = &written.value else {
        let keys = known().collect::<Vec<_>>().join(", ");
        report.add(place, wrong_type(&format!("a table with keys of {keys}"), written));
        return None;
    };
    for (key, entry) in table.iter().filter(|(key, _)| !known().any(|name| name == *key)) {
        let place = Place { path: join(&place.path, key), origin: entry.origin };
        let places = places(key, report.keys, "");
        let is_clear = (1..=PLACES_MAX).contains(&places.len());
        let suggestion = match !is_clear || known().any(|name| is_near(key, name)) {
            true => Suggestion::for_name(key, known()),
            false => Suggestion::Elsewhere(places),
        };
        report.add(&place, Situation::UnknownKey { suggestion });
    }
    Some(table)
}

/// A misplaced key that more tables than this have gets no hint, because it belongs to none in
/// particular.
const PLACES_MAX: usize = 4;

/// The paths of all keys with this name in the tables below `fields`.
fn places(key: &str, fields: &[Field], path: &str) -> Vec<String> {
    let mut found = Vec::new();
    for field in fields {
        let path = join(path, field.key.name);
        match field.shape {
            _ if field.key.name == key => found.push(path),
            Shape::Table(below) | Shape::Tables(below) => found.extend(places(key, below, &path)),
            _ => {}
        }
    }
    found
}

fn is_near(key: &str, name: &str) -> bool {
    matches!(Suggestion::for_name(key, [name]), Suggestion::Near(_))
}

/// The value of one key: as written, or its default. If a required key is missing, reports that and
/// returns a placeholder.
pub(super) fn field<T: Setting>(
    table: &Table,
    place: &Place,
    key: &'static KeySpec,
    report: &mut Report<'_>,
) -> Option<T> {
    let path = join(&place.path, key.name);
    let written = table.get(key.name);
    report.origins.note(path.clone(), written.map_or(Origin::Default, |entry| entry.origin));
    let place = Place { path, origin: written.map_or(place.origin, |entry| entry.origin) };
    match written {
        Some(entry) => {
            if let Some(value) = T::read(entry, &place, key, report) {
                return Some(value);
            }
        }
        None => {
            if let Fallback::Required(hint) = key.fallback {
                report.add(&place, Situation::Missing { hint });
            }
        }
    }
    key.written_default(&report.surroundings.machine)
        .map_or_else(T::placeholder, |entry| T::read(&entry, &place, key, report))
}
