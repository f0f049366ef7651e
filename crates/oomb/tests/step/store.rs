//! The page store alone: what it hands out is what was written, whatever the streams are slow at.

use crate::common::Random;
use oomb::kv::{Access, KvLayout, KvMemory, KvShape, Mode, Store};
use oomb_device::cpu::{Cpu, CpuOptions, Delays, Poison};
use oomb_device::device::new_tensor;
use oomb_device::ops::attention::PageRef;
use oomb_device::ops::optim::OptimOps;
use oomb_device::{DType, Device};
use std::time::Duration;

const PAGE: [usize; 4] = [2, 1, 2, 4];

/// `kinds`: 1 for keys and values, 2 with their gradients.
fn store(device: &Cpu, layout: &KvLayout, kinds: usize) -> Store<Cpu> {
    let memory = || {
        let page_bytes = PAGE.iter().product::<usize>() * 4;
        let shape = [&[layout.device_slots()][..], &PAGE].concat();
        let slab = new_tensor(device, DType::F32, &shape).expect("memory");
        let host = Some(device.alloc_pinned((layout.host_slots() * page_bytes) as u64).expect("memory"));
        KvMemory { slab, host }
    };
    Store::new(device, layout, memory(), (kinds == 2).then(memory))
}

fn slow(compute: u64, copy_in: u64, copy_out: u64) -> Cpu {
    let [compute, copy_in, copy_out] = [compute, copy_in, copy_out].map(Duration::from_micros);
    let delays = Some(Delays { compute, copy_in, copy_out, seed: 3 });
    Cpu::new(CpuOptions { delays, poison: Poison::On, ..CpuOptions::default() })
}

fn write(device: &Cpu, store: &mut Store<Cpu>, layer: usize, page: usize, value: f32) {
    let refs = store.append(layer, page..page + 1);
    device.fill(&mut store.slab().index(refs[0].slot as usize), value);
    store.appended(layer, page..page + 1);
}

fn values(device: &Cpu, slab: &oomb_device::Tensor<Cpu>, page: PageRef) -> Vec<f32> {
    device.download_f32(&slab.index(page.slot as usize)).expect("the device works")
}

/// A page that is written, evicted by another new page, and read at once into a frame that was clean: only the host
/// slot's own event orders the copy in behind the copy out.
#[test]
fn a_page_is_read_back_after_it_was_saved() {
    for round in 0..20 {
        let device = slow(0, 0, 3000);
        let shape = KvShape { num_layers: 1, num_pages: 8, chunk_pages: 1, group_pages: 1 };
        let layout = KvLayout::new(shape, 2, 0).expect("the smallest ring");
        assert_eq!(layout.resident_groups, 0);
        let mut store = store(&device, &layout, 1);
        let access = |page: usize| Access { layer: 0, pages: page..page + 1, mode: Mode::Forward };
        store.begin([1, 2, 3, 7].map(access).to_vec());
        for page in 0..8 {
            write(&device, &mut store, 0, page, page as f32);
        }
        let read = |store: &mut Store<Cpu>, page: usize, wanted: f32| {
            let group = store.next_group().expect("announced");
            assert_eq!(group.kv[0].index as usize, page);
            let seen = values(&device, store.slab(), group.kv[0]);
            assert!(seen.iter().all(|&value| value == wanted), "round {round}, page {page}: {seen:?}, wanted {wanted}");
            store.done(group);
            assert!(store.next_group().is_none());
        };
        read(&mut store, 1, 1.0);
        read(&mut store, 2, 2.0);
        store.free(0, 7..8);
        write(&device, &mut store, 0, 7, 70.0);
        read(&mut store, 3, 3.0);
        store.free(0, 5..6);
        write(&device, &mut store, 0, 5, 50.0);
        read(&mut store, 7, 70.0);
    }
}

/// Random accesses of random layouts against a map of what was written and added.
#[test]
fn pages_hold_what_was_written_and_added() {
    let mut random = Random::fresh("pages_hold_what_was_written_and_added");
    for _ in 0..30 {
        let device = slow(random.bits() % 100, random.bits() % 300, random.bits() % 300);
        let shape = KvShape {
            num_layers: 1 + random.below(3),
            num_pages: 3 + random.below(10),
            chunk_pages: 1 + random.below(3),
            group_pages: 1 + random.below(3),
        };
        let prefetch = random.below(3);
        let frames = shape.min_frames(prefetch) + random.below(4);
        let layout = KvLayout::new(shape, frames, prefetch).expect("enough frames");
        let mut store = store(&device, &layout, 2);
        let mut accesses = Vec::new();
        for _ in 0..12 {
            let start = random.below(shape.num_pages);
            let pages = start..start + 1 + random.below(shape.num_pages - start);
            let mode = if random.below(2) == 0 { Mode::Forward } else { Mode::Backward };
            accesses.push(Access { layer: random.below(shape.num_layers), pages, mode });
        }
        store.begin(accesses.clone());
        let value = |layer: usize, page: usize| (100 * layer + page + 1) as f32;
        for layer in 0..shape.num_layers {
            for page in 0..shape.num_pages {
                write(&device, &mut store, layer, page, value(layer, page));
            }
        }
        let mut added = vec![vec![0.0f32; shape.num_pages]; shape.num_layers];
        for access in &accesses {
            let mut seen = Vec::new();
            while let Some(group) = store.next_group() {
                for (index, &page) in group.kv.iter().enumerate() {
                    let (layer, number) = (access.layer, page.index as usize);
                    seen.push(number);
                    assert_eq!(values(&device, store.slab(), page)[0], value(layer, number));
                    let Some(&grad) = group.grads.get(index) else { continue };
                    assert_eq!(grad.index, page.index);
                    let sum = values(&device, store.grad_slab(), grad)[5];
                    assert_eq!(sum, added[layer][number], "gradient of layer {layer}, page {number}");
                    added[layer][number] = sum + 1.0;
                    device.fill(&mut store.grad_slab().index(grad.slot as usize), sum + 1.0);
                }
                store.done(group);
            }
            assert_eq!(seen, access.pages.clone().collect::<Vec<_>>());
        }
        device.synchronize().unwrap();
    }
}
