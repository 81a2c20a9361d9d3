//! tmp
use crate::Result;
use crate::parameter::Parameter;
/// tmp
pub fn local_squared_norm(_p: &[Parameter], _c: &dyn Fn(&str) -> usize) -> Result<f64> {
    Ok(1.0)
}
