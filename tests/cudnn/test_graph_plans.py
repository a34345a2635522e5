"""What an engine may be used for, and that cuDNN takes the graphs (where it is installed)."""

import pytest

from dynamemo.cudnn.errors import CudnnError
from dynamemo.cudnn.graph_plans import Note, build_graph, is_allowed
from dynamemo.cudnn.library import load
from dynamemo.cudnn.plans import Convolution, Direction

USUAL = {
    "direction": Direction.FORWARD,
    "dtype_char": "f",
    "x_shape": (2, 4, 9, 9),
    "w_shape": (8, 4, 3, 3),
    "y_shape": (2, 8, 9, 9),
    "pad": (1, 1),
    "stride": (1, 1),
    "dilation": (1, 1),
    "groups": 1,
}
VOLUME = {"x_shape": (2, 4, 9, 9, 9), "w_shape": (8, 4, 3, 3, 3), "y_shape": (2, 8, 9, 9, 9)}
THREE = {"pad": (1, 1, 1), "stride": (1, 1, 1), "dilation": (1, 1, 1)}
LINE = {"x_shape": (2, 4, 9), "w_shape": (8, 4, 3), "y_shape": (2, 8, 9)}
ONE = {"pad": (1,), "stride": (1,), "dilation": (1,)}
LAST = {"x_shape": (2, 9, 9, 4), "w_shape": (8, 3, 3, 4), "y_shape": (2, 9, 9, 8)}


def convolution(**changes):
    return Convolution(**{**USUAL, **changes})


@pytest.mark.parametrize(
    ("changes", "note", "expected"),
    [
        ({}, None, True),
        ({"is_deterministic": True}, Note.NONDETERMINISTIC, False),
        ({"is_deterministic": False}, Note.NONDETERMINISTIC, True),
        ({"allow_tensor_core": True}, Note.TENSOR_CORE, True),
        ({"allow_tensor_core": False}, Note.TENSOR_CORE, False),
        ({"dtype_char": "f"}, Note.DOWN_CONVERT_INPUTS, False),
        ({"dtype_char": "e"}, Note.DOWN_CONVERT_INPUTS, True),
        ({"dtype_char": "e"}, Note.REDUCED_PRECISION_REDUCTION, False),
        ({}, Note.WINOGRAD_TILE_6X6, True),
        ({}, Note.WINOGRAD_TILE_13X13, False),
        ({}, Note.FFT, True),
    ],
)
def test_engines_are_used_by_their_numerical_notes(changes, note, expected):
    notes = frozenset() if note is None else frozenset({int(note)})

    assert is_allowed(convolution(**changes), notes) is expected


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype_char": "e"},
        {"dtype_char": "d"},
        {**VOLUME, **THREE},
        {**LINE, **ONE},
        {**LAST, "x_layout": 1, "w_layout": 1},
        {"w_shape": (8, 2, 3, 3), "groups": 2},
        {"y_shape": (2, 8, 7, 7), "dilation": (2, 2)},
        {"y_shape": (2, 8, 5, 5), "stride": (2, 2)},
        {"alignment_bytes": 4},
    ],
)
def test_cudnn_takes_the_graph(direction, changes):
    try:
        library = load()
    except CudnnError as error:
        pytest.skip(str(error))

    assert build_graph(library, convolution(direction=direction, **changes), 0).pointer


def test_an_axis_is_added_where_there_is_only_one():
    widened = convolution(**LINE, **ONE).with_two_axes()

    assert (widened.x_shape, widened.w_shape) == ((2, 4, 1, 9), (8, 4, 1, 3))
    assert (widened.pad, widened.stride, widened.dilation) == ((0, 1), (1, 1), (1, 1))
    assert convolution().with_two_axes() == convolution()


def test_labels_are_short_and_tell_what_is_unusual():
    assert convolution().label() == "2×4×9×9 * 8×4×3×3 /1 pad 1 f"
    grouped = convolution(w_shape=(8, 2, 3, 3), groups=2, dilation=(2, 1))
    assert grouped.label() == "2×4×9×9 * 8×2×3×3 /1 pad 1 dilate 2×1 groups 2 f"
