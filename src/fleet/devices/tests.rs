//! Devices as `nvidia-smi -L` lists them, and the findings about engines that name them.
//!
//! A script plays `nvidia-smi`; no GPU is needed.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use crate::driver::EngineSettings;
use crate::test_programs::write_program;
use sluice_config::{Address, ArgValue, Config, Launch, Machine, Surroundings};
use sluice_core::base::BackendId;

const LIST: &str = "GPU 0: NVIDIA H200 (UUID: GPU-aaaa-1)
  MIG 3g.71gb     Device  0: (UUID: MIG-1111-a)
  MIG 1g.18gb     Device  1: (UUID: MIG-2222-b)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb-2)
";

fn rules() -> sluice_config::Fleet {
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    let text = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:1\"\n";
    Config::parse(text, "test", &[], &around).unwrap().config.fleet
}

fn engine(name: &str, gpu: &[&str], share: Option<f64>) -> EngineSpec {
    let device = |text: &&str| text.parse().map_or_else(|_| Gpu::Name((*text).to_owned()), Gpu::Index);
    let command = vec!["vllm".to_owned(), "serve".to_owned(), "m".to_owned()].into();
    let launch = Launch { gpu: gpu.iter().map(device).collect(), ..Launch::of(command, 8001) };
    let target = Target::Launch(launch);
    let args = share.map(|share| ("gpu-memory-utilization".to_owned(), ArgValue::Float(share)));
    EngineSpec {
        name: name.into(),
        backend: BackendId::new(0),
        address: Arc::new(Address::new(target.endpoint(), None, None)),
        settings: EngineSettings { args: args.into_iter().collect::<BTreeMap<_, _>>() },
        identity: String::new(),
        configured: String::new(),
        target,
        starts_on_demand: false,
        leaving: false,
        slots: 1,
        spill: Vec::new(),
        models: Vec::new(),
        adapters: Vec::new(),
        golden: Vec::new(),
        rules: rules(),
        moves_after: None,
        stall: Duration::from_secs(1),
        request_timeout: Duration::from_secs(1),
    }
}

fn found(engines: &[EngineSpec]) -> DeviceFindings {
    check_devices(engines, Some(&InstalledDevices::parse(LIST)))
}

#[tokio::test]
async fn the_list_of_the_program_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("nvidia-smi");
    write_program(&program, &format!("#!/bin/sh\n[ \"$1\" = -L ] || exit 1\ncat <<'X'\n{LIST}X\n"));
    let list = InstalledDevices::read_with(program.as_os_str()).await.unwrap();
    assert_eq!(list, InstalledDevices::parse(LIST));
    assert_eq!((list.0.len(), list.slices_of("0"), list.slices_of("1")), (2, 2, 0));
    assert_eq!(InstalledDevices::read_with("/nonexistent/nvidia-smi".as_ref()).await, None);
}

#[test]
fn a_device_that_does_not_exist_is_refused_with_those_that_exist() {
    let engines =
        [engine("p/a", &["MIG-1111-a"], None), engine("p/b", &["MIG-3333"], None), engine("p/c", &["7"], None)];
    let DeviceFindings { refused, remarks } = found(&engines);
    assert_eq!(refused[0].0, 1);
    assert!(refused[0].1.contains("no slice MIG-3333") && refused[0].1.contains("MIG-2222-b"), "{refused:?}");
    assert!(refused[1].0 == 2 && refused[1].1.contains("0 (GPU-aaaa-1), 1 (GPU-bbbb-2)"), "{refused:?}");
    assert_eq!((refused.len(), remarks), (2, vec!["gpu 0: 1 of 2 slices are used".to_owned()]));
}

#[test]
fn a_gpu_and_its_slices_are_not_both_used() {
    let engines = [engine("p/a", &["MIG-1111-a"], None), engine("p/b", &["0"], None), engine("p/c", &["1"], None)];
    let refused = found(&engines).refused;
    assert_eq!((refused.len(), refused[0].0), (1, 1), "{refused:?}");
    assert!(refused[0].1.contains("here and by p/a"), "{refused:?}");
    let named = [engine("p/a", &["GPU-aaaa-1"], None)];
    let DeviceFindings { refused, remarks } = found(&named);
    assert!(refused.is_empty() && remarks[0].contains("divided into 2 slices"), "{remarks:?}");
}

#[test]
fn engines_on_one_device_must_fit_into_the_memory() {
    let pair = |one: Option<f64>, two: Option<f64>| [engine("p/a", &["1"], one), engine("p/b", &["GPU-bbbb"], two)];
    assert!(found(&pair(Some(0.5), Some(0.5))).refused.is_empty());
    let refused = found(&pair(None, Some(0.2))).refused;
    assert!(refused[0].0 == 1 && refused[0].1.contains("gpu 1 take 1.10") && refused[0].1.contains("p/a 0.9"));
    let slices = [engine("p/a", &["MIG-1111-a"], None), engine("p/b", &["MIG-2222-b"], None)];
    assert!(found(&slices).refused.is_empty(), "slices have their own memory");
    let thirds: Vec<EngineSpec> = ["p/a", "p/b", "p/c"].map(|name| engine(name, &["1"], Some(1.0 / 3.0))).into();
    assert!(found(&thirds).refused.is_empty());
}

#[test]
fn of_engines_that_take_turns_the_largest_counts() {
    let share = |mut spec: EngineSpec| {
        let Target::Launch(launch) = &mut spec.target else { unreachable!() };
        launch.share = Some("gpu1".to_owned());
        spec
    };
    let mut engines = vec![share(engine("p/a", &["1"], Some(0.7))), share(engine("p/b", &["1"], Some(0.8)))];
    engines.push(engine("p/c", &["1"], Some(0.2)));
    assert!(found(&engines).refused.is_empty());
    engines.push(engine("p/d", &["1"], Some(0.1)));
    assert!(found(&engines).refused[0].1.contains("take 1.10"), "{:?}", found(&engines));
}

#[test]
fn without_a_list_only_equal_texts_are_one_device() {
    let engines = [engine("p/a", &["0"], None), engine("p/b", &["0"], None)];
    assert_eq!(check_devices(&engines, None).refused.len(), 1);
    let named = [engine("p/a", &["MIG-9"], None)];
    let DeviceFindings { refused, remarks } = check_devices(&named, None);
    assert!(refused.is_empty() && names_devices(&named) && remarks[0].contains("nvidia-smi cannot be run"));
}
