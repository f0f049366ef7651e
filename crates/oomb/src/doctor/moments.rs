//! AdamW with moments in bf16 and in 8 bits, with masters and without. It must not know what another backend computes.

use super::Kind;
use super::rig::{Output, Outputs, Random, Rig};
use oomb_device::device::new_tensor;
use oomb_device::ops::moments::{BLOCK_ELEMENTS, SmallFloat};
use oomb_device::ops::optim::{AdamW, AdamWState, Moment, RandomBits};
use oomb_device::{Backend, DType, Result};

/// Every device draws the same random bits, and rounds alike but where it lies within a rounding of f32 from a draw.
pub(super) fn run<B: Backend>(rig: &Rig<'_, B>, len: usize) -> Result<Vec<Output>> {
    let (mut random, shape, mut out) = (Random::new(9), [len], Outputs::new(rig));
    for (dtype, with_master, names) in [
        (DType::Bf16, true, ["w, bf16 moments", "m, bf16", "v, bf16"]),
        (DType::U8, false, ["w, 8-bit moments, no master", "m, 8 bits", "v, 8 bits"]),
    ] {
        let values = random.values(len);
        let (mut w, mut master) = (rig.activation(&shape, &values)?, rig.f32(&shape, &values)?);
        let mut moments = [new_tensor(rig.device, dtype, &shape)?, new_tensor(rig.device, dtype, &shape)?];
        moments.iter_mut().for_each(|moment| rig.device.fill(moment, 0.0));
        let blocks = len.div_ceil(BLOCK_ELEMENTS);
        let mut scales = [rig.f32(&[blocks], &vec![1.0; blocks])?, rig.f32(&[blocks], &vec![1.0; blocks])?];
        for step in 1..=2 {
            let grad = rig.f32(&shape, &random.values(len))?;
            let [m, v] = &mut moments;
            let [m_scales, v_scales] = scales.each_mut().map(|scales| (dtype == DType::U8).then_some(scales));
            let (m, v) = (Moment { values: m, scales: m_scales }, Moment { values: v, scales: v_scales });
            let random = RandomBits { seed: u64::from(step), first: 0 };
            let state = AdamWState { master: with_master.then_some(&mut master), m, v, random };
            let hyper = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
            rig.device.adamw(&mut w, state, &grad, hyper, None);
        }
        out.of("adamw, rounded moments").add(names[0], &w)?;
        for ((moment, scales), (format, name)) in
            moments.iter().zip(&scales).zip([SmallFloat::Signed, SmallFloat::Unsigned].into_iter().zip(&names[1..]))
        {
            let values = if dtype == DType::U8 {
                let (codes, scales) = (rig.device.download_u8(moment)?, rig.device.download_f32(scales)?);
                let value = |(i, &code): (usize, &u8)| f64::from(format.decode(code, scales[i / BLOCK_ELEMENTS]));
                codes.iter().enumerate().map(value).collect()
            } else {
                rig.get(moment)?
            };
            out.values(name, Kind::Stochastic, values);
        }
    }
    Ok(out.list)
}
