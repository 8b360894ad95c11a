"""Changes valid bytes and messages with a seeded random generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)

WHOLE = (
    0,
    1,
    2,
    3,
    7,
    255,
    4096,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
REAL = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
TEXT = ("", "a", "\x00", "é" * 40, "x" * 300, "../../etc/passwd", "a/b", "\n", "{" * 50, "🪸" * 30)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Makes one to four changes: flipped bits, changed bytes, cuts, repetitions, insertions."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(content) + 1)
        match rng.randrange(7):
            case 0 if content:
                content[place % len(content)] ^= 1 << rng.randrange(8)
            case 1 if content:
                content[place % len(content)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del content[place:]
            case 3:
                del content[place : place + rng.randrange(1, 9)]
            case 4:
                content[place:place] = content[place : place + rng.randrange(1, 64)]
            case 5:
                content[place:place] = rng.randbytes(rng.randrange(1, 9))
            case _:
                value = rng.choice(WHOLE).to_bytes(8, "little")[: rng.choice((1, 2, 4, 8))]
                content[place : place + len(value)] = value
    return bytes(content)


def mutate_message(rng: random.Random, message: M) -> M:
    """Returns a copy with one to three changed fields, or with changed bytes that can still be parsed."""
    if rng.random() < 0.15:
        try:
            return type(message).FromString(mutate_bytes(rng, message.SerializeToString()))
        except DecodeError:  # gRPC refuses such a message before Atoll's code runs
            return message
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change(rng, changed)
    return changed


def _change(rng: random.Random, message: Message) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.is_repeated:
        _change_list(rng, message, field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            _change(rng, getattr(message, field.name))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(rng, field, getattr(message, field.name)))


def _change_list(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    values: Any = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if values and rng.random() < 0.5:
            _change(rng, rng.choice(values))
        elif values and rng.random() < 0.5:
            del values[rng.randrange(len(values))]
        elif values:
            values.add().CopyFrom(rng.choice(values))
        else:
            _change(rng, values.add())
    elif values and rng.random() < 0.3:
        del values[rng.randrange(len(values))]
    else:
        values.extend(_value(rng, field, None) for _ in range(rng.choice((1, 2, 40))))


def _value(rng: random.Random, field: FieldDescriptor, old: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return mutate_bytes(rng, old or b"something")
        return rng.choice(TEXT)
    if kind in {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}:
        return rng.choice(REAL)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 77))
    largest = {
        FieldDescriptor.CPPTYPE_UINT32: 1 << 32, FieldDescriptor.CPPTYPE_UINT64: 1 << 64,
        FieldDescriptor.CPPTYPE_INT32: 1 << 31, FieldDescriptor.CPPTYPE_INT64: 1 << 63,
    }[kind]  # fmt: skip
    return rng.choice(
        [value for value in WHOLE if value < largest] + [min(largest - 1, max(0, (old or 0) + rng.choice((-1, 1))))]
    )


def sometimes(rng: random.Random, chance: float, change: Callable[[random.Random, M], M], message: M) -> M:
    """Returns the value, changed with this probability."""
    return change(rng, message) if rng.random() < chance else message
