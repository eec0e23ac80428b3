//! What a configuration's `gpu` string asks for.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A GPU requirement: `TYPE`, `TYPE:COUNT` or `COUNT`.
///
/// ```
/// use runtime_core::gpu::GpuSpec;
///
/// let gpu: GpuSpec = "A100:2".parse().unwrap();
/// assert_eq!((gpu.gpu_type(), gpu.count()), (Some("A100"), 2));
/// let any: GpuSpec = "2".parse().unwrap();
/// assert_eq!((any.gpu_type(), any.count()), (None, 2));
/// assert!(!GpuSpec::parse(None).unwrap().is_requested());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct GpuSpec {
    gpu_type: Option<String>,
    count: u32,
}

impl GpuSpec {
    /// Parses a configuration's optional string. Without one, or with an empty one, no GPU is asked for.
    ///
    /// All digits are a count and leave the type to the provider. Anything else is a type, with a count of 1 unless
    /// one follows a colon. A count of 0 asks for no GPU.
    ///
    /// # Errors
    /// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) naming the field `gpu`: a count that is not a decimal number
    /// or does not fit, more than one colon, a control character.
    pub fn parse(spec: Option<&str>) -> Result<Self> {
        let Some(spec) = spec.filter(|spec| !spec.is_empty()) else {
            return Ok(Self::default());
        };
        if spec.chars().any(char::is_control) {
            return Err(Error::invalid_config(
                "gpu",
                format!("{spec:?} contains a control character"),
            ));
        }
        if is_decimal(spec) {
            return Ok(Self {
                gpu_type: None,
                count: parse_count(spec, spec)?,
            });
        }
        let (gpu_type, count) = match spec.split_once(':') {
            None | Some((_, "")) => (spec.trim_end_matches(':'), 1),
            Some((gpu_type, count)) => (gpu_type, parse_count(count, spec)?),
        };
        Ok(Self {
            gpu_type: Some(gpu_type.to_owned()),
            count,
        })
    }

    /// The type, as it was written. `None` leaves the choice to the provider; `Some("")` comes from a spec such as
    /// `:2`, whose type is there but empty, and which a provider may refuse.
    pub fn gpu_type(&self) -> Option<&str> {
        self.gpu_type.as_deref()
    }

    /// How many GPUs.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether any GPU is asked for at all.
    pub fn is_requested(&self) -> bool {
        self.count > 0
    }
}

fn is_decimal(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn parse_count(count: &str, spec: &str) -> Result<u32> {
    let refuse = |message: String| Err(Error::invalid_config("gpu", message));
    if !is_decimal(count) {
        return refuse(format!(
            "the count in {spec:?} must be a decimal number, as in \"A100:2\", not {count:?}"
        ));
    }
    match count.parse() {
        Ok(count) => Ok(count),
        Err(_) => refuse(format!("the count in {spec:?} is too large")),
    }
}

impl FromStr for GpuSpec {
    type Err = Error;

    fn from_str(spec: &str) -> Result<Self> {
        Self::parse(Some(spec))
    }
}

impl fmt::Display for GpuSpec {
    /// The shortest spec that parses to the same requirement; no GPU of no type is the empty string.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.gpu_type, self.count) {
            (None, 0) => Ok(()),
            (None, count) => write!(f, "{count}"),
            (Some(gpu_type), 1) if !gpu_type.is_empty() && !is_decimal(gpu_type) => f.write_str(gpu_type),
            (Some(gpu_type), count) => write!(f, "{gpu_type}:{count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ErrorKind;

    #[test]
    fn every_documented_form_is_read_as_documented() {
        for (spec, gpu_type, count) in [
            (None, None, 0),
            (Some(""), None, 0),
            (Some("A100"), Some("A100"), 1),
            (Some("A100:2"), Some("A100"), 2),
            (Some("2"), None, 2),
            (Some("0"), None, 0),
            (Some("A100:0"), Some("A100"), 0),
            (Some("A100:"), Some("A100"), 1),
            (Some(":2"), Some(""), 2),
            (Some(":"), Some(""), 1),
            (Some("-1"), Some("-1"), 1),
            (Some("H100 NVL:8"), Some("H100 NVL"), 8),
        ] {
            let gpu = GpuSpec::parse(spec).unwrap();
            assert_eq!((gpu.gpu_type(), gpu.count()), (gpu_type, count), "{spec:?}");
            assert_eq!(gpu.is_requested(), count > 0, "{spec:?}");
        }
    }

    #[test]
    fn a_bad_count_names_the_field() {
        for spec in [
            "A100:x",
            "A100:2:3",
            "A100::",
            "A100:-1",
            "A100:+1",
            "A100: 2",
            "A100:1.5",
            "A100:1_0",
            "A100:٢",
            "A100:4294967296",
            "99999999999999999999",
            "A\n100",
            "A\0:1",
        ] {
            let error = GpuSpec::parse(Some(spec)).expect_err(spec);
            assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{spec:?}");
            assert_eq!(error.field(), Some("gpu"), "{spec:?}");
        }
    }

    proptest! {
        #[test]
        fn what_parses_is_written_back_to_the_same(spec in "[A-Z0-9:]{0,4}(:[0-9]{0,3})?") {
            if let Ok(gpu) = GpuSpec::parse(Some(&spec)) {
                let written = gpu.to_string();
                prop_assert_eq!(GpuSpec::parse(Some(&written)).unwrap(), gpu, "{:?} -> {:?}", spec, written);
            }
        }

        #[test]
        fn no_string_makes_it_panic(spec in any::<String>()) {
            let _ = GpuSpec::parse(Some(&spec));
        }
    }
}
