//! The messages of the programs besides commands (`bpf/spdk.h`), as Rust types.

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals, unreachable_pub, dead_code, clippy::all)]
mod raw {
    include!(concat!(env!("OUT_DIR"), "/spdk.rs"));
}

pub(crate) use raw::{
    SPDK_ABSENT, SPDK_ARGUMENT_BITS, SPDK_ARGUMENT_CONSTANT, SPDK_ARGUMENT_MEMORY, SPDK_ARGUMENT_REGISTER,
    SPDK_EVENT_CC, SPDK_EVENT_DESTRUCT, SPDK_EVENT_DISCONNECT, SPDK_EVENT_RESET, SPDK_EVENT_SUBSYSTEM,
    SPDK_NO_FD, spdk_event_message, spdk_in_flight, spdk_queue_message, spdk_went_message,
};

/// One message that is no command.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "lives on the stack, and few of them come")]
pub(crate) enum Message {
    Queue(spdk_queue_message),
    Went(spdk_went_message),
    Event(spdk_event_message),
}

impl Message {
    /// The message in these bytes; `None` when they are too short or of no known kind.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Message> {
        let kind = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        match kind {
            raw::SPDK_MSG_QUEUE => read(bytes).map(Message::Queue),
            raw::SPDK_MSG_QUEUE_WENT => read(bytes).map(Message::Went),
            raw::SPDK_MSG_EVENT => read(bytes).map(Message::Event),
            _ => None,
        }
    }
}

/// Plain structures of integers and characters: every bit pattern is a value.
trait Plain: Copy {}
impl Plain for spdk_queue_message {}
impl Plain for spdk_went_message {}
impl Plain for spdk_event_message {}

fn read<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() < size_of::<T>() {
        return None;
    }
    // SAFETY: the length was checked, every bit pattern is a valid `T`, and the read needs no alignment.
    Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<T>()) })
}

#[cfg(test)]
mod tests {
    use super::Message;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(kind in 0u32..24, rest in proptest::collection::vec(any::<u8>(), 0..800)) {
            let bytes = [kind.to_ne_bytes().as_slice(), &rest].concat();
            let parsed = Message::parse(&bytes);
            if let Some(Message::Went(message)) = parsed {
                let queue = message.queue.to_ne_bytes();
                prop_assert_eq!(queue.as_slice(), &bytes[8..16]);
            }
            prop_assert!(parsed.is_none() || (16..19).contains(&kind));
        }
    }
}
