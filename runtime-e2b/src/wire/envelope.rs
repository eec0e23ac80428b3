//! The envelope of Connect's streams: a flag byte, a big-endian length, a payload.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The payload is compressed. We never negotiate that, so a frame that has it is refused.
pub const COMPRESSED: u8 = 0x01;

/// The last frame; its payload is JSON whatever the codec.
pub const END_OF_STREAM: u8 = 0x02;

/// The longest payload that is accepted. envd sends at most 32 KiB of output at once.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// The bytes of one frame.
pub fn encode(flags: u8, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(5 + payload.len());
    frame.put_u8(flags);
    // Payloads are far below 4 GiB: a request is one program's argv and variables.
    frame.put_u32(u32::try_from(payload.len()).unwrap_or(u32::MAX));
    frame.put_slice(payload);
    frame.freeze()
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its flags.
    pub flags: u8,
    /// Its payload.
    pub payload: Bytes,
}

/// Why a stream of frames cannot be read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// A frame is compressed although that was not negotiated.
    Compressed,
    /// A payload is longer than [`MAX_PAYLOAD`].
    TooLong(u32),
}

/// Cuts chunks, whose boundaries mean nothing, into frames. A payload that lies within one chunk is not copied.
#[derive(Debug, Default)]
pub struct Decoder {
    chunks: VecDeque<Bytes>,
    length: usize,
}

impl Decoder {
    /// Adds what arrived.
    pub fn push(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.length += chunk.len();
            self.chunks.push_back(chunk);
        }
    }

    /// Whether nothing of a further frame has arrived.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The next whole frame, if it has arrived.
    ///
    /// # Errors
    /// What the other side did wrong; the stream cannot be read on.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Broken> {
        let Some(header) = self.peek() else { return Ok(None) };
        let flags = header[0];
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
        if flags & COMPRESSED != 0 {
            return Err(Broken::Compressed);
        }
        let payload_length = usize::try_from(length).unwrap_or(usize::MAX);
        if payload_length > MAX_PAYLOAD {
            return Err(Broken::TooLong(length));
        }
        if self.length < 5 + payload_length {
            return Ok(None);
        }
        self.take(5);
        Ok(Some(Frame {
            flags,
            payload: self.take(payload_length),
        }))
    }

    fn peek(&self) -> Option<[u8; 5]> {
        if self.length < 5 {
            return None;
        }
        let mut header = [0; 5];
        let bytes = self.chunks.iter().flat_map(|chunk| chunk.iter());
        for (slot, byte) in header.iter_mut().zip(bytes) {
            *slot = *byte;
        }
        Some(header)
    }

    /// Takes `count` bytes, which are there.
    fn take(&mut self, count: usize) -> Bytes {
        self.length -= count;
        let mut gathered = BytesMut::new();
        let mut missing = count;
        while missing > 0 {
            let Some(chunk) = self.chunks.front_mut() else { break };
            let part = chunk.split_to(missing.min(chunk.len()));
            missing -= part.len();
            if !chunk.has_remaining() {
                self.chunks.pop_front();
            }
            if missing == 0 && gathered.is_empty() {
                return part;
            }
            gathered.extend_from_slice(&part);
        }
        gathered.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(decoder: &mut Decoder) -> Vec<Frame> {
        std::iter::from_fn(|| decoder.next_frame().expect("sound")).collect()
    }

    #[test]
    fn frames_are_found_wherever_the_chunks_are_cut() {
        let wanted = [
            Frame {
                flags: 0,
                payload: Bytes::from_static(b"hello"),
            },
            Frame {
                flags: 0,
                payload: Bytes::new(),
            },
            Frame {
                flags: 2,
                payload: Bytes::from_static(b"{}"),
            },
        ];
        let stream: Vec<u8> = wanted
            .iter()
            .flat_map(|frame| encode(frame.flags, &frame.payload))
            .collect();
        for size in 1..=stream.len() {
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            for chunk in stream.chunks(size) {
                decoder.push(Bytes::copy_from_slice(chunk));
                found.extend(frames(&mut decoder));
            }
            assert_eq!(found, wanted, "chunks of {size}");
            assert!(decoder.is_empty());
        }
    }

    #[test]
    fn a_compressed_or_endless_frame_is_refused() {
        let mut decoder = Decoder::default();
        decoder.push(Bytes::from_static(&[1, 0, 0, 0, 0]));
        assert_eq!(decoder.next_frame(), Err(Broken::Compressed));
        let mut decoder = Decoder::default();
        decoder.push(Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff]));
        assert_eq!(decoder.next_frame(), Err(Broken::TooLong(u32::MAX)));
    }

    #[test]
    fn the_end_frame_has_its_measured_bytes() {
        assert_eq!(&encode(END_OF_STREAM, b"{}")[..], b"\x02\x00\x00\x00\x02{}");
    }
}
