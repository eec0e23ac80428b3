//! The filter for programs in restricted boxes: sockets of the families that a network namespace confines, no others.
//!
//! `AF_VSOCK` reaches the hypervisor whatever the namespace, `AF_ALG` and others are kernel surface, and a packet
//! socket has no business in a box without a network. io_uring is refused because it makes sockets without a system
//! call that a filter could see.

use crate::sys::SockFilter;

const LOAD_WORD: u16 = 0x20;
const JUMP_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const OFFSET_FIRST_ARGUMENT: u32 = 16;

const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;
const EAFNOSUPPORT: u32 = 97;
const ENOSYS: u32 = 38;

/// `AF_UNIX`, `AF_INET`, `AF_INET6`, `AF_NETLINK`.
const FAMILIES: [u32; 4] = [1, 2, 10, 16];

struct Abi {
    arch: u32,
    /// `socket` and `socketpair`, under every number that the architecture knows them by.
    sockets: &'static [u32],
    /// `socketcall`, whose arguments a filter cannot see beyond the first.
    multiplexed: Option<u32>,
    /// `io_uring_setup`.
    uring: &'static [u32],
}

#[cfg(target_arch = "x86_64")]
const ABIS: &[Abi] = &[
    Abi {
        arch: 0xc000_003e,
        // The second pair is the x32 view of the same calls.
        sockets: &[41, 53, 0x4000_0000 | 41, 0x4000_0000 | 53],
        multiplexed: None,
        uring: &[425, 0x4000_0000 | 425],
    },
    Abi {
        arch: 0x4000_0003,
        sockets: &[359, 360],
        multiplexed: Some(102),
        uring: &[425],
    },
];

#[cfg(target_arch = "aarch64")]
const ABIS: &[Abi] = &[
    Abi {
        arch: 0xc000_00b7,
        sockets: &[198, 199],
        multiplexed: None,
        uring: &[425],
    },
    Abi {
        arch: 0x4000_0028,
        sockets: &[281, 288],
        multiplexed: None,
        uring: &[425],
    },
];

#[cfg(target_arch = "riscv64")]
const ABIS: &[Abi] = &[Abi {
    arch: 0xc000_00f3,
    sockets: &[198, 199],
    multiplexed: None,
    uring: &[425],
}];

/// Other architectures have no filter: a restricted program does not start there.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")))]
const ABIS: &[Abi] = &[];

fn statement(code: u16, k: u32) -> SockFilter {
    SockFilter { code, jt: 0, jf: 0, k }
}

/// Continues with the next instruction if equal, else skips `otherwise`.
fn unless_equal_skip(k: u32, otherwise: usize) -> SockFilter {
    SockFilter {
        code: JUMP_EQUAL,
        jt: 0,
        jf: otherwise as u8,
        k,
    }
}

/// The program; `None` where this architecture has none.
pub(crate) fn filter() -> Option<Vec<SockFilter>> {
    if ABIS.is_empty() {
        return None;
    }
    let mut program = vec![statement(LOAD_WORD, OFFSET_ARCH)];
    for abi in ABIS {
        let block = abi_block(abi);
        program.push(unless_equal_skip(abi.arch, block.len()));
        program.extend(block);
    }
    // An architecture that we know nothing about gets no system call at all.
    program.push(statement(RETURN, ERRNO | ENOSYS));
    Some(program)
}

fn abi_block(abi: &Abi) -> Vec<SockFilter> {
    let mut block = vec![statement(LOAD_WORD, OFFSET_NUMBER)];
    for &number in abi.uring {
        block.push(unless_equal_skip(number, 1));
        block.push(statement(RETURN, ERRNO | ENOSYS));
    }
    for &number in abi.sockets {
        let mut check = vec![statement(LOAD_WORD, OFFSET_FIRST_ARGUMENT)];
        for family in FAMILIES {
            check.push(unless_equal_skip(family, 1));
            check.push(statement(RETURN, ALLOW));
        }
        check.push(statement(RETURN, ERRNO | EAFNOSUPPORT));
        block.push(unless_equal_skip(number, check.len()));
        block.extend(check);
    }
    if let Some(number) = abi.multiplexed {
        // Calls 1 and 8 are `socket` and `socketpair`.
        block.push(unless_equal_skip(number, 5));
        block.push(statement(LOAD_WORD, OFFSET_FIRST_ARGUMENT));
        block.push(unless_equal_skip(1, 1));
        block.push(statement(RETURN, ERRNO | EAFNOSUPPORT));
        block.push(unless_equal_skip(8, 1));
        block.push(statement(RETURN, ERRNO | EAFNOSUPPORT));
    }
    block.push(statement(RETURN, ALLOW));
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would make of one system call.
    fn decide(arch: u32, number: u32, argument: u32) -> u32 {
        let program = filter().expect("this architecture has a filter");
        let (mut at, mut loaded) = (0, 0);
        loop {
            let instruction = program[at];
            at += 1;
            match (instruction.code, instruction.k) {
                (LOAD_WORD, OFFSET_NUMBER) => loaded = number,
                (LOAD_WORD, OFFSET_ARCH) => loaded = arch,
                (LOAD_WORD, OFFSET_FIRST_ARGUMENT) => loaded = argument,
                (JUMP_EQUAL, k) => at += usize::from(if loaded == k { instruction.jt } else { instruction.jf }),
                (RETURN, k) => return k,
                other => panic!("unexpected instruction {other:?}"),
            }
        }
    }

    #[test]
    fn only_confined_families_get_a_socket_in_every_abi() {
        for abi in ABIS {
            for &number in abi.sockets {
                for family in 0..64 {
                    let wanted = if FAMILIES.contains(&family) {
                        ALLOW
                    } else {
                        ERRNO | EAFNOSUPPORT
                    };
                    assert_eq!(decide(abi.arch, number, family), wanted, "{number} {family}");
                }
            }
            for &number in abi.uring {
                assert_eq!(decide(abi.arch, number, 1), ERRNO | ENOSYS);
            }
            assert_eq!(decide(abi.arch, 0, 40), ALLOW, "other calls are not judged");
            if let Some(number) = abi.multiplexed {
                assert_eq!(decide(abi.arch, number, 1), ERRNO | EAFNOSUPPORT);
                assert_eq!(decide(abi.arch, number, 8), ERRNO | EAFNOSUPPORT);
                assert_eq!(decide(abi.arch, number, 3), ALLOW);
            }
        }
        assert_eq!(decide(0x1234, 0, 0), ERRNO | ENOSYS);
    }

    #[test]
    fn jumps_stay_inside_the_program() {
        let program = filter().expect("this architecture has a filter");
        assert!(program.len() < 256);
        for (at, instruction) in program.iter().enumerate() {
            assert!(
                at + 1 + usize::from(instruction.jf.max(instruction.jt)) < program.len() || instruction.code == RETURN
            );
        }
    }
}
