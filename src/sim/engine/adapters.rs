//! Where LoRA adapters lie: in a slot of the GPU, in host memory, or on disk only.
//!
//! As in vLLM both places are least-recently-used caches: `--max-loras` slots on the GPU, `--max-cpu-loras` adapters in host
//! memory (by default as many). A step that uses an adapter which is in neither reads it from disk while everybody waits;
//! one that is in host memory alone is copied to a slot. What these cost is the cost model's business; here they are
//! counted. Invariants: at most as many as fit; what a step uses is on the GPU afterwards.

/// What a step had to load before it could start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterLoads {
    /// Adapters read from disk into host memory.
    pub from_disk: u32,
    /// Adapters copied into a slot of the GPU, those just read included.
    pub to_gpu: u32,
}

/// A least-recently-used set; few enough entries to search by hand.
#[derive(Clone, Debug, Default)]
struct Recent {
    /// Least recently used first.
    entries: Vec<u16>,
    room: usize,
}

impl Recent {
    fn new(room: usize) -> Self {
        Self { entries: Vec::new(), room }
    }

    /// Uses an entry; says whether it was there already. Otherwise the least recently used one makes room.
    fn touch(&mut self, adapter: u16) -> bool {
        let place = self.entries.iter().position(|entry| *entry == adapter);
        match place {
            Some(place) => {
                self.entries.remove(place);
            }
            None if self.entries.len() >= self.room => {
                self.entries.remove(0);
            }
            None => {}
        }
        self.entries.push(adapter);
        place.is_some()
    }
}

/// The adapters of one engine. See the head of this file.
#[derive(Clone, Debug, Default)]
pub(super) struct Adapters {
    gpu: Recent,
    host: Recent,
}

impl Adapters {
    /// None loaded. vLLM wants at least as much room in host memory as on the GPU.
    pub(super) fn new(max_loras: u32, max_cpu_loras: u32) -> Self {
        let slots = max_loras.max(1) as usize;
        Self { gpu: Recent::new(slots), host: Recent::new((max_cpu_loras as usize).max(slots)) }
    }

    /// Makes sure that the adapters of a step (each once, at most `max_loras`) are on the GPU.
    pub(super) fn prepare(&mut self, used: &[u16]) -> AdapterLoads {
        let mut loads = AdapterLoads::default();
        for adapter in used {
            loads.from_disk += u32::from(!self.host.touch(*adapter));
            loads.to_gpu += u32::from(!self.gpu.touch(*adapter));
        }
        loads
    }

    /// An adapter was removed: it is read again when it comes back.
    pub(super) fn remove(&mut self, adapter: u16) {
        self.gpu.entries.retain(|entry| *entry != adapter);
        self.host.entries.retain(|entry| *entry != adapter);
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
    fn host_memory_saves_the_disk_and_not_the_copy() {
        let mut adapters = Adapters::new(1, 2);
        assert_eq!(adapters.prepare(&[0]), loads(1, 1));
        assert_eq!(adapters.prepare(&[1]), loads(1, 1));
        assert_eq!(adapters.prepare(&[0]), loads(0, 1));
        assert_eq!(adapters.prepare(&[2]), loads(1, 1));
        assert_eq!(adapters.prepare(&[0]), loads(0, 1), "1 was used least recently");
        assert_eq!(adapters.prepare(&[1]), loads(1, 1));
        adapters.remove(1);
        assert_eq!(adapters.prepare(&[1]), loads(1, 1));
    }
}
