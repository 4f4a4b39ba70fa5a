//! Student's t distribution: how far a figure may be off by chance.

/// How many standard errors an estimate with so many degrees of freedom is off with probability `both`, in
/// either direction together. `freedom` is at least 1.
pub(crate) fn quantile(both: f64, freedom: f64) -> f64 {
    let freedom = freedom.max(1.0);
    let (mut low, mut high) = (0.0, 2.0);
    while outside(high, freedom) > both && high < 1e12 {
        low = high;
        high *= 2.0;
    }
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if outside(middle, freedom) > both {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

/// The probability of being off by more than `t` standard errors in either direction.
fn outside(t: f64, freedom: f64) -> f64 {
    incomplete_beta(freedom / (freedom + t * t), freedom / 2.0, 0.5)
}

/// The regularised incomplete beta function, by its continued fraction (Abramowitz and Stegun, 26.5.8, evaluated
/// by Lentz's method).
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    if x >= 1.0 {
        return 1.0;
    }
    // The fraction converges quickly on this side only.
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(1.0 - x, b, a);
    }
    let front = (log_gamma(a + b) - log_gamma(a) - log_gamma(b) + a * x.ln() + b * (-x).ln_1p()).exp() / a;
    let away_from_zero = |v: f64| if v.abs() < 1e-300 { 1e-300 } else { v };
    let mut c = 1.0;
    let mut d = 1.0 / away_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut fraction = d;
    for m in 1..500 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        for numerator in [even, odd] {
            d = 1.0 / away_from_zero(1.0 + numerator * d);
            c = away_from_zero(1.0 + numerator / c);
            fraction *= c * d;
        }
        if (c * d - 1.0).abs() < 1e-14 {
            break;
        }
    }
    front * fraction
}

/// The logarithm of the gamma function of a positive number, by Stirling's series.
fn log_gamma(mut x: f64) -> f64 {
    // The series needs a large argument.
    let mut less = 0.0;
    while x < 10.0 {
        less += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series = (1.0 / 12.0 - inverse * (1.0 / 360.0 - inverse * (1.0 / 1260.0 - inverse / 1680.0))) / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - less
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (both, freedom, expected) in [
            (0.05, 1.0, 12.706_204_736),
            (0.05, 10.0, 2.228_138_852),
            (0.01, 4.0, 4.604_094_871),
            (0.001, 30.0, 3.645_958_635),
            (0.05, 1e7, 1.959_964_2),
        ] {
            let found = quantile(both, freedom);
            assert!((found - expected).abs() < 1e-5 * expected, "{both} {freedom}: {found}");
        }
    }

    #[test]
    fn less_freedom_and_more_certainty_mean_more_room() {
        let mut last = 0.0;
        for freedom in (1..200).rev() {
            let now = quantile(0.001, f64::from(freedom));
            assert!(now > last);
            last = now;
        }
        assert!(quantile(1e-6, 12.0) > quantile(1e-5, 12.0));
    }
}
