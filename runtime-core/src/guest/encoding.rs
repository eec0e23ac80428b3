//! How values become the bytes of a frame's body, and come back checked.
//!
//! Compiled into both sides, as [`frame`](super::frame) is. It uses `std` alone and performs no I/O.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// A frame that breaks the protocol, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Malformed {}

/// The unread rest of a body.
pub struct Input<'a>(pub(super) &'a [u8]);

impl<'a> Input<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(Malformed("a body ends early"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Malformed("a body ends early"))?;
        self.0 = rest;
        Ok(*head)
    }
}

/// A value with one encoding.
pub trait Wire: Sized {
    /// Appends the encoding.
    fn put(&self, out: &mut Vec<u8>);
    /// Takes one value off the input.
    ///
    /// # Errors
    /// When the input is too short or holds a value that cannot be.
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed>;
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Wire for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                Ok(Self::from_le_bytes(input.array()?))
            }
        }
    )*};
}
integers!(u8, u16, u32, u64, i32, i64);

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        match u8::take(input)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a flag is neither 0 nor 1")),
        }
    }
}

impl<const N: usize> Wire for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        input.array()
    }
}

impl Wire for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>) {
        // A body beyond MAX is refused by `encode`, so the length always fits.
        (self.len() as u32).put(out);
        out.extend_from_slice(self);
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let count = u32::take(input)? as usize;
        Ok(input.bytes(count)?.to_vec())
    }
}

/// Several values, their number first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

impl<T: Wire> Wire for List<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u32).put(out);
        for item in &self.0 {
            item.put(out);
        }
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let count = u32::take(input)? as usize;
        // Every value takes at least one byte, and at most a small multiple of it in memory is reserved up front.
        if count > input.0.len() {
            return Err(Malformed("a list is longer than its body"));
        }
        let mut items = Vec::with_capacity(count.min(64));
        for _ in 0..count {
            items.push(T::take(input)?);
        }
        Ok(Self(items))
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        Ok((A::take(input)?, B::take(input)?))
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        Ok(if bool::take(input)? {
            Some(T::take(input)?)
        } else {
            None
        })
    }
}

impl Wire for SocketAddr {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::V4(addr) => {
                out.push(4);
                addr.ip().octets().put(out);
            }
            Self::V6(addr) => {
                out.push(6);
                addr.ip().octets().put(out);
                addr.scope_id().put(out);
            }
        }
        self.port().put(out);
    }
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        match u8::take(input)? {
            4 => {
                let ip = Ipv4Addr::from(<[u8; 4]>::take(input)?);
                Ok(Self::V4(SocketAddrV4::new(ip, u16::take(input)?)))
            }
            6 => {
                let ip = Ipv6Addr::from(<[u8; 16]>::take(input)?);
                let scope = u32::take(input)?;
                Ok(Self::V6(SocketAddrV6::new(ip, u16::take(input)?, 0, scope)))
            }
            _ => Err(Malformed("an address is neither IPv4 nor IPv6")),
        }
    }
}
