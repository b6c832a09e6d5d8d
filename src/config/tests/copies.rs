//! Backends that stand for several equal processes.
//!
//! The tests check names, ports and devices of the copies. A change of the number must not change
//! the copies that stay, and each mistake must be reported once.

use super::{read, read_with, valid};
use crate::{Config, Gpu, Target};

fn text(launch: &str) -> String {
    format!("[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"w\"\nlaunch = {{ command = [\"x\"], {launch} }}\n")
}

fn copies(config: &Config) -> Vec<(String, u16, Vec<String>)> {
    let copy = |backend: &crate::Backend| {
        let Target::Launch(launch) = &backend.target else { unreachable!() };
        assert_eq!(launch.copies, None);
        (backend.name.clone(), launch.port, launch.gpu.iter().map(Gpu::to_string).collect())
    };
    config.pools[0].backends.iter().map(copy).collect()
}

fn refused(text: &str) -> Vec<String> {
    read(text).unwrap_err().lines().collect()
}

#[test]
fn each_copy_is_a_backend_with_a_port_and_one_of_the_devices() {
    let own = |name: &str, port, gpu: &str| (name.to_owned(), port, vec![gpu.to_owned()]);
    let config = valid(&text("copies = 3, port = 9000, gpu = [0, \"MIG-1a-2b\"]"));
    assert_eq!(copies(&config), [own("w-0", 9000, "0"), own("w-1", 9001, "MIG-1a-2b"), own("w-2", 9002, "0")]);
    let config = valid(&text("copies = 2"));
    assert_eq!(copies(&config), [("w-0".to_owned(), 0, vec![]), ("w-1".to_owned(), 0, vec![])]);
    assert_eq!(copies(&valid(&text("copies = 1")))[0].0, "w-0", "more copies do not rename the first");
    let set = read_with(&text("copies = 1"), &["pool.p.backend.w.launch.copies=2"]).unwrap().config;
    assert_eq!(copies(&set).len(), 2);
}

#[test]
fn more_copies_leave_the_others_as_they_are() {
    let (few, many) = (valid(&text("copies = 2, gpu = [0, 1]")), valid(&text("copies = 3, gpu = [0, 1]")));
    let compared = |config: &Config| config.pools[0].backends.iter().map(|it| it.target.compared()).collect::<Vec<_>>();
    assert_eq!(compared(&few), compared(&many)[..2]);
    let changes: Vec<String> = crate::diff::changes(&few, &many).iter().map(ToString::to_string).collect();
    assert_eq!(changes, ["pool.p.backend.w-2: added"]);
}

#[test]
fn mistakes_are_reported_once_and_with_the_line() {
    assert_eq!(
        refused(&text("copies = 0")),
        ["test.toml:5:29: pool[0].backend[0].launch.copies: 0 is outside 1 to 64"]
    );
    assert!(refused(&text("copies = 65"))[0].ends_with("65 is outside 1 to 64"));
    assert!(refused(&text("copies = \"4\""))[0].contains("expected a whole number"));
    let unknown = refused(&text("copies = 4, ports = 9"));
    assert!(unknown.len() == 1 && unknown[0].contains("backend[0].launch.ports: unknown key"), "{unknown:?}");
    let gpu = refused(&text("copies = 4, gpu = [\"cuda:0\"]"));
    assert!(gpu.len() == 1 && gpu[0].contains("'cuda:0' is no GPU"), "{gpu:?}");
    let beyond = refused(&text("copies = 4, port = 65534"));
    assert!(beyond.len() == 1 || beyond[0].contains("would need ports up to 65537"), "{beyond:?}");
    assert!(beyond[0].contains("would need ports up to 65537"), "{beyond:?}");
}

#[test]
fn ports_of_copies_overlap_with_no_other_backend() {
    let other = "[[pool.backend]]\nname = \"o\"\nlaunch = { command = [\"x\"], port = 9002 }\n";
    let clash = refused(&(text("copies = 4, port = 9000") + other));
    assert!(clash.len() == 1 && clash[0].contains("port 9002 already belongs to backend 'p/w-2'"), "{clash:?}");
    let url = "[[pool.backend]]\nname = \"o\"\nurl = \"http://127.0.0.1:9001\"\n";
    let clash = refused(&(text("copies = 4, port = 9000") + url));
    assert!(clash.len() == 1 && clash[0].contains("is already backend 'p/w-1'"), "{clash:?}");
    let name = "[[pool.backend]]\nname = \"w-3\"\nlaunch = { command = [\"x\"] }\n";
    assert!(refused(&(text("copies = 4") + name))[0].contains("'w-3' is used twice"));
    let with_url = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"w\"\nurl = \"http://127.0.0.1:1\"\n\
                    launch = { command = [\"x\"], copies = 2 }\n";
    assert!(refused(with_url)[0].contains("not both"));
}
