"""Contents of frames, and the values that these encode."""

from __future__ import annotations

import numpy as np
from atoll.fragments.segments import Coded
from atoll_wire.codec import frame_codec
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FragmentLayout


def values(coded: Coded, fragment: FragmentLayout, kind: Codec) -> np.ndarray:
    """Returns the encoded values as one vector."""
    out = np.zeros(fragment.length, np.float32)
    for span, content in zip(fragment.frames, coded.contents, strict=True):
        frame_codec.content_add(content, span, kind, np.ones(len(span.segments), np.float32), out)
    return out


def contents(vector: np.ndarray, fragment: FragmentLayout, kind: Codec) -> Coded:
    """Returns the contents of a vector's frames."""
    return Coded.of([frame_codec.quantise_frame(vector[span.place], span, kind) for span in fragment.frames])
