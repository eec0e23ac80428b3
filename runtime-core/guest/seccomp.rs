//! The filters for programs: sockets of the families that a network namespace confines, and no others; and in a box of
//! the guest's own making also nothing that could undo it.
//!
//! `AF_VSOCK` reaches the hypervisor whatever the namespace, `AF_ALG` and others are kernel surface, and a packet
//! socket has no business in a box without a network. io_uring is refused because it makes sockets without a system
//! call that a filter could see.
//!
//! In a box of the guest's own making no program has a capability, so most of what the stricter filter refuses would fail
//! anyway; a new user namespace, in which everybody has them all, is what it is there for, and parts of the kernel
//! through which others have escaped: mounting, keyrings, BPF, performance events, user-mode page faults.

use crate::sys::SockFilter;

const LOAD_WORD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const JUMP_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const OFFSET_FIRST_ARGUMENT: u32 = 16;
const OFFSET_SECOND_ARGUMENT: u32 = 24;

const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;
const EPERM: u32 = 1;
const EAFNOSUPPORT: u32 = 97;
const ENOSYS: u32 = 38;

/// `AF_UNIX`, `AF_INET`, `AF_INET6`, `AF_NETLINK`.
const FAMILIES: [u32; 4] = [1, 2, 10, 16];

/// Every `CLONE_NEW*` but that of time, which shares its bit with a signal number.
const NAMESPACES: u32 = 0x7e02_0000;
/// And that one, where there is no signal number.
const TIME_NAMESPACE: u32 = 0x80;
/// Typing into a terminal, and the console's way of doing so.
const TERMINAL_INPUT: [u32; 2] = [0x5412, 0x541c];
/// Where x32 begins: the same calls under other numbers.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

/// Refused in a box of the guest's own making, by numbers that every architecture shares: `open_tree`, `move_mount`,
/// `fsopen`, `fsconfig`, `fsmount`, `fspick`, `mount_setattr`, `open_tree_attr`.
const REFUSED: [u32; 8] = [428, 429, 430, 431, 432, 433, 442, 467];
/// Said not to exist, so that programs take an older way that can be judged: `clone3`; and io_uring's three.
const ABSENT: [u32; 4] = [435, 425, 426, 427];

/// How much is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strictness {
    /// What leads around a network namespace.
    Network,
    /// And what leads out of a box that has nothing but the kernel around it.
    Box,
}

struct Abi {
    arch: u32,
    /// `socket` and `socketpair`, under every number that the architecture knows them by.
    sockets: &'static [u32],
    /// `socketcall`, whose arguments a filter cannot see beyond the first.
    multiplexed: Option<u32>,
    /// `io_uring_setup`.
    uring: &'static [u32],
    clone: u32,
    unshare: u32,
    ioctl: u32,
    /// `mount`, `umount`, `umount2`, `pivot_root`, `setns`; `keyctl`, `add_key`, `request_key`; `bpf`,
    /// `perf_event_open`, `userfaultfd`, `open_by_handle_at`; `kexec_load`, `init_module`, `finit_module`,
    /// `delete_module`.
    refused: &'static [u32],
}

#[cfg(target_arch = "x86_64")]
const ABIS: &[Abi] = &[
    Abi {
        arch: 0xc000_003e,
        // The second pair is the x32 view of the same calls.
        sockets: &[41, 53, X32 | 41, X32 | 53],
        multiplexed: None,
        uring: &[425, X32 | 425],
        clone: 56,
        unshare: 272,
        ioctl: 16,
        refused: &[
            165, 166, 155, 308, 250, 248, 249, 321, 298, 323, 304, 246, 320, 175, 313, 176,
        ],
    },
    Abi {
        arch: 0x4000_0003,
        sockets: &[359, 360],
        multiplexed: Some(102),
        uring: &[425],
        clone: 120,
        unshare: 310,
        ioctl: 54,
        refused: &[
            21, 22, 52, 217, 346, 288, 286, 287, 357, 336, 374, 342, 283, 128, 350, 129,
        ],
    },
];

#[cfg(target_arch = "aarch64")]
const ABIS: &[Abi] = &[
    Abi {
        arch: 0xc000_00b7,
        sockets: &[198, 199],
        multiplexed: None,
        uring: &[425],
        clone: 220,
        unshare: 97,
        ioctl: 29,
        refused: GENERIC,
    },
    Abi {
        arch: 0x4000_0028,
        sockets: &[281, 288],
        multiplexed: None,
        uring: &[425],
        clone: 120,
        unshare: 337,
        ioctl: 54,
        refused: &[
            21, 22, 52, 218, 375, 311, 309, 310, 386, 364, 388, 371, 347, 128, 379, 129,
        ],
    },
];

#[cfg(target_arch = "riscv64")]
const ABIS: &[Abi] = &[Abi {
    arch: 0xc000_00f3,
    sockets: &[198, 199],
    multiplexed: None,
    uring: &[425],
    clone: 220,
    unshare: 97,
    ioctl: 29,
    refused: GENERIC,
}];

#[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
const GENERIC: &[u32] = &[
    40, 39, 41, 268, 219, 217, 218, 280, 241, 282, 265, 104, 294, 105, 273, 106,
];

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

/// The same for another test.
fn unless_skip(code: u16, k: u32, otherwise: usize) -> SockFilter {
    SockFilter {
        code,
        ..unless_equal_skip(k, otherwise)
    }
}

/// The program; `None` where this architecture has none.
pub(crate) fn filter(strictness: Strictness) -> Option<Vec<SockFilter>> {
    if ABIS.is_empty() {
        return None;
    }
    let mut program = vec![statement(LOAD_WORD, OFFSET_ARCH)];
    for abi in ABIS {
        let block = abi_block(abi, strictness);
        // A conditional jump is too short for a whole block.
        program.push(SockFilter {
            code: JUMP_EQUAL,
            jt: 1,
            jf: 0,
            k: abi.arch,
        });
        program.push(statement(JUMP, block.len() as u32));
        program.extend(block);
    }
    // An architecture that we know nothing about gets no system call at all.
    program.push(statement(RETURN, ERRNO | ENOSYS));
    Some(program)
}

fn abi_block(abi: &Abi, strictness: Strictness) -> Vec<SockFilter> {
    let mut block = vec![statement(LOAD_WORD, OFFSET_NUMBER)];
    if strictness == Strictness::Box {
        block.extend(box_block(abi));
    }
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

/// What the stricter filter refuses. Begins and ends with the number loaded.
fn box_block(abi: &Abi) -> Vec<SockFilter> {
    let mut block = Vec::new();
    #[cfg(target_arch = "x86_64")]
    if abi.arch == 0xc000_003e {
        block.push(unless_skip(JUMP_AT_LEAST, X32, 1));
        block.push(statement(RETURN, ERRNO | ENOSYS));
    }
    for number in ABSENT {
        block.push(unless_equal_skip(number, 1));
        block.push(statement(RETURN, ERRNO | ENOSYS));
    }
    for &number in REFUSED.iter().chain(abi.refused) {
        block.push(unless_equal_skip(number, 1));
        block.push(statement(RETURN, ERRNO | EPERM));
    }
    for (number, flags) in [(abi.clone, NAMESPACES), (abi.unshare, NAMESPACES | TIME_NAMESPACE)] {
        block.push(unless_equal_skip(number, 4));
        block.push(statement(LOAD_WORD, OFFSET_FIRST_ARGUMENT));
        block.push(unless_skip(JUMP_ANY_BIT, flags, 1));
        block.push(statement(RETURN, ERRNO | EPERM));
        block.push(statement(RETURN, ALLOW));
    }
    block.push(unless_equal_skip(abi.ioctl, 6));
    block.push(statement(LOAD_WORD, OFFSET_SECOND_ARGUMENT));
    for request in TERMINAL_INPUT {
        block.push(unless_equal_skip(request, 1));
        block.push(statement(RETURN, ERRNO | EPERM));
    }
    block.push(statement(RETURN, ALLOW));
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would make of one system call.
    fn decide_by(program: &[SockFilter], arch: u32, number: u32, arguments: [u32; 2]) -> u32 {
        let (mut at, mut loaded) = (0, 0);
        loop {
            let instruction = program[at];
            at += 1;
            let taken = |holds: bool| usize::from(if holds { instruction.jt } else { instruction.jf });
            match (instruction.code, instruction.k) {
                (LOAD_WORD, OFFSET_NUMBER) => loaded = number,
                (LOAD_WORD, OFFSET_ARCH) => loaded = arch,
                (LOAD_WORD, OFFSET_FIRST_ARGUMENT) => loaded = arguments[0],
                (LOAD_WORD, OFFSET_SECOND_ARGUMENT) => loaded = arguments[1],
                (JUMP, k) => at += k as usize,
                (JUMP_EQUAL, k) => at += taken(loaded == k),
                (JUMP_AT_LEAST, k) => at += taken(loaded >= k),
                (JUMP_ANY_BIT, k) => at += taken(loaded & k != 0),
                (RETURN, k) => return k,
                other => panic!("unexpected instruction {other:?}"),
            }
        }
    }

    fn decide(arch: u32, number: u32, argument: u32) -> u32 {
        let program = filter(Strictness::Network).expect("this architecture has a filter");
        decide_by(&program, arch, number, [argument, 0])
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
    fn a_box_of_our_own_refuses_what_could_undo_it_in_every_abi() {
        let program = filter(Strictness::Box).expect("this architecture has a filter");
        for abi in ABIS {
            let decide = |number, arguments| decide_by(&program, abi.arch, number, arguments);
            for &number in REFUSED.iter().chain(abi.refused) {
                assert_eq!(decide(number, [0, 0]), ERRNO | EPERM, "{number}");
            }
            for number in ABSENT {
                assert_eq!(decide(number, [0, 0]), ERRNO | ENOSYS, "{number}");
            }
            for bit in 0..32 {
                let flag = 1 << bit;
                let is_namespace = NAMESPACES & flag != 0;
                let refused = |is: bool| if is { ERRNO | EPERM } else { ALLOW };
                assert_eq!(decide(abi.clone, [flag | 17, 0]), refused(is_namespace), "{flag:x}");
                let is_namespace = is_namespace || flag == TIME_NAMESPACE;
                assert_eq!(decide(abi.unshare, [flag, 0]), refused(is_namespace), "{flag:x}");
            }
            assert_eq!(decide(abi.ioctl, [0, 0x5412]), ERRNO | EPERM);
            assert_eq!(decide(abi.ioctl, [0, 0x5401]), ALLOW);
            for &number in abi.sockets.iter().filter(|number| **number < 0x4000_0000) {
                assert_eq!(decide(number, [2, 0]), ALLOW);
                assert_eq!(decide(number, [40, 0]), ERRNO | EAFNOSUPPORT);
            }
            assert_eq!(decide(0, [0, 0]), ALLOW, "other calls are not judged");
        }
        #[cfg(target_arch = "x86_64")]
        for number in [0, 41, 56, 165, 272] {
            assert_eq!(decide_by(&program, 0xc000_003e, X32 | number, [0, 0]), ERRNO | ENOSYS);
        }
    }

    #[test]
    fn jumps_stay_inside_the_program() {
        for strictness in [Strictness::Network, Strictness::Box] {
            let program = filter(strictness).expect("this architecture has a filter");
            assert!(program.len() < 4096);
            for (at, instruction) in program.iter().enumerate() {
                let furthest = match instruction.code {
                    JUMP => instruction.k as usize,
                    _ => usize::from(instruction.jf.max(instruction.jt)),
                };
                assert!(at + 1 + furthest < program.len() || instruction.code == RETURN);
            }
        }
    }
}
