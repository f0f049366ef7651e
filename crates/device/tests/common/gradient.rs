//! Gradients against finite differences.
//!
//! It must not know any op.

/// `Σ a · b`: the scalar whose gradient a backward op gives, with `b` the gradient of the op's output.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `end - start`: what an accumulating op added.
pub fn added(end: &[f64], start: &[f64]) -> Vec<f64> {
    end.iter().zip(start).map(|(end, start)| end - start).collect()
}

/// Asserts that `gradient` is the gradient of `f` at `x`, by central differences of fourth order: with a step of 1e-3 both
/// their error, which falls with its fourth power, and the rounding of f64 stay well below 1e-6.
pub fn check_gradient(name: &str, gradient: &[f64], x: &[f64], f: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-3;
    assert_eq!(gradient.len(), x.len(), "{name}");
    let largest = gradient.iter().fold(0.0f64, |a, b| a.max(b.abs()));
    assert!(largest > 0.0, "{name}: the gradient is zero");
    for (i, &claimed) in gradient.iter().enumerate() {
        let at = |steps: f64| {
            let mut x = x.to_vec();
            x[i] += steps * STEP;
            f(&x)
        };
        let measured = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * STEP);
        let error = (measured - claimed).abs();
        // Relative, except where the gradient nearly vanishes beside its neighbours.
        let allowed = 1e-6 * claimed.abs().max(1e-2 * largest);
        assert!(error <= allowed, "{name}[{i}]: claimed {claimed:e}, measured {measured:e}");
    }
}
