//! The place of each LoRA adapter: a slot of the GPU, host memory, or only the disk.
//!
//! As in vLLM, the GPU (`--max-loras` slots) and host memory (`--max-cpu-loras` adapters, by
//! default as many as slots) are least-recently-used caches. A step that uses an adapter in neither
//! cache reads the adapter from disk while all sequences wait. An adapter in host memory is copied
//! to a slot. Loads are counted here and priced by the cost model. Adapters loaded before the first
//! step (`--lora-modules`) pass through both caches in order, so the last ones stay.

/// Adapters that a step had to load before it could start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterLoads {
    /// Adapters read from disk into host memory.
    pub from_disk: u32,
    /// Adapters copied into a slot of the GPU, including adapters just read from disk.
    pub to_gpu: u32,
}

/// A least-recently-used set, small enough for a linear search.
#[derive(Clone, Debug, Default)]
struct Recent {
    entries: Vec<u16>,
    capacity: usize,
}

impl Recent {
    fn new(capacity: usize) -> Self {
        Self { entries: Vec::new(), capacity }
    }

    /// Marks an adapter as used. Returns whether it was present. An adapter that was not is added;
    /// in a full set, it replaces the least recently used one.
    fn touch(&mut self, adapter: u16) -> bool {
        let place = self.entries.iter().position(|entry| *entry == adapter);
        match place {
            Some(place) => {
                self.entries.remove(place);
            }
            None if self.entries.len() >= self.capacity => {
                self.entries.remove(0);
            }
            None => {}
        }
        self.entries.push(adapter);
        place.is_some()
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Adapters {
    gpu: Recent,
    host: Recent,
}

impl Adapters {
    /// Empty caches. Host memory has room for at least as many adapters as the GPU.
    pub(super) fn new(max_loras: u32, max_cpu_loras: u32) -> Self {
        let slots = max_loras.max(1) as usize;
        Self { gpu: Recent::new(slots), host: Recent::new((max_cpu_loras as usize).max(slots)) }
    }

    /// Loads the adapters of a step (each listed once, at most `max_loras`).
    pub(super) fn prepare(&mut self, used: &[u16]) -> AdapterLoads {
        let mut loads = AdapterLoads::default();
        for adapter in used {
            loads.from_disk += u32::from(!self.host.touch(*adapter));
            loads.to_gpu += u32::from(!self.gpu.touch(*adapter));
        }
        loads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(from_disk: u32, to_gpu: u32) -> AdapterLoads {
        AdapterLoads { from_disk, to_gpu }
    }

    #[test]
    fn with_room_for_one_two_adapters_throw_each_other_out() {
        let mut adapters = Adapters::new(1, 1);
        for adapter in [0, 1, 0, 1] {
            assert_eq!(adapters.prepare(&[adapter]), loads(1, 1));
        }
        assert_eq!(adapters.prepare(&[1]), loads(0, 0));
    }

    #[test]
    fn of_more_adapters_than_room_the_last_loaded_stay() {
        let mut adapters = Adapters::new(2, 3);
        assert_eq!([0, 1, 2, 3].map(|adapter| adapters.prepare(&[adapter])), [loads(1, 1); 4]);
        assert_eq!(adapters.prepare(&[2, 3]), loads(0, 0), "both are in a slot");
        assert_eq!(adapters.prepare(&[1]), loads(0, 1), "only in host memory");
        assert_eq!(adapters.prepare(&[0]), loads(1, 1), "on disk again");
    }

    #[test]
    fn host_memory_saves_the_disk_and_not_the_copy() {
        let mut adapters = Adapters::new(1, 2);
        assert_eq!(adapters.prepare(&[0]), loads(1, 1));
        assert_eq!(adapters.prepare(&[1]), loads(1, 1));
        assert_eq!(adapters.prepare(&[0]), loads(0, 1));
        assert_eq!(adapters.prepare(&[2]), loads(1, 1));
        assert_eq!(adapters.prepare(&[0]), loads(0, 1), "1 was used least recently");
        assert_eq!(adapters.prepare(&[1]), loads(1, 1));
    }
}
