//! Whether the engine gave the GPUs that were asked for.

use runtime_core::{Error, ErrorKind, Result};

/// Prints one name per GPU.
pub(crate) const QUERY: [&str; 3] = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"];

/// Compares what the box sees with what was asked for. The type is a word of each name.
///
/// # Errors
/// Naming `gpu`, with what the box sees.
pub(crate) fn verify(gpu_type: &str, count: u32, success: bool, names: &str) -> Result<()> {
    let fail = |message: String| Err(Error::new(ErrorKind::Unavailable, message).with_field("gpu"));
    if !success {
        return fail("cannot verify the type of the GPUs: nvidia-smi failed".to_owned());
    }
    let names: Vec<&str> = names.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let is_of_type = |name: &&str| name.split([' ', '-']).any(|word| word.eq_ignore_ascii_case(gpu_type));
    if names.len() == count as usize && names.iter().all(is_of_type) {
        return Ok(());
    }
    fail(format!(
        "asked for {gpu_type}:{count}, but the box sees: {}",
        names.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_is_a_word_of_every_name() {
        let ok = |gpu_type, count, names| verify(gpu_type, count, true, names).is_ok();
        assert!(ok("A100", 1, "NVIDIA A100-SXM4-80GB\n"));
        assert!(ok("a100", 2, "NVIDIA A100-SXM4-80GB\nNVIDIA A100 PCIe\n"));
        assert!(!ok("A10", 1, "NVIDIA A100-SXM4-80GB\n"), "a part of a word");
        assert!(!ok("A100", 2, "NVIDIA A100-SXM4-80GB\n"), "too few");
        assert!(!ok("A100", 1, "NVIDIA H100\n"));
        let error = verify("A100", 1, false, "").expect_err("no nvidia-smi");
        assert_eq!(error.field(), Some("gpu"));
    }
}
