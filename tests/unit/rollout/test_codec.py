"""The MessagePack codec: arrays, schemas, and what it refuses."""

import math
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import InvalidRequest, SparkrollError
from engine.types import (
    CacheHit,
    GroupOutput,
    GroupRequest,
    NamedTensor,
    SampleOutput,
    SampleResume,
    SamplingParams,
    ScoreRequest,
    Span,
    Want,
)
from rollout import codec
from rollout.codec import BF16, F8_E4M3, F8_E5M2, decode, encode, pack_array, unpack_array

Ext = msgspec.msgpack.Ext


def raw(value) -> bytes:
    return msgspec.msgpack.encode(value)


def group_body(**request) -> bytes:
    return raw({"group_id": "g", "prompt_ids": [1, 2], **request})


DTYPES = ["u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, min_side=0)))
)
def test_arrays_survive_bit_for_bit(array):
    back = unpack_array(pack_array(array).data)
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert not back.flags.writeable


@pytest.mark.parametrize("dtype", [BF16, F8_E4M3, F8_E5M2])
def test_raw_bit_dtypes_keep_their_name(dtype):
    bits = np.arange(12, dtype="u1")
    back = unpack_array(pack_array(bits.view(dtype)).data)
    assert back.dtype == dtype and back.tobytes() == bits.tobytes()


def test_other_layouts_are_converted():
    array = np.arange(12, dtype=">u4").reshape(3, 4).T
    back = unpack_array(pack_array(array).data)
    assert back.dtype == np.dtype("<u4") and (back == array).all()


def test_layout_is_as_documented():
    ext = pack_array(np.array([[1, 2, 3]], dtype="<u4"))
    assert ext.code == 1
    assert ext.data == b"\x03\x02" + struct.pack("<2I", 1, 3) + bytes(6) + struct.pack("<3I", 1, 2, 3)


def test_decoding_copies_nothing():
    body = encode(SampleResume(index=0, ids=np.arange(5000, dtype="<u4")))
    ids = decode(body, SampleResume).ids
    start = np.frombuffer(body, "u1").__array_interface__["data"][0]
    assert start < ids.__array_interface__["data"][0] < start + len(body)


def test_non_finite_numbers_survive():
    column = np.array([-np.inf, np.nan, np.inf, -0.5], dtype="<f4")
    back = unpack_array(pack_array(column).data)
    assert back.tobytes() == column.tobytes()
    params = decode(encode(SamplingParams(logit_bias={3: -math.inf})), SamplingParams)
    assert params.logit_bias == {3: -math.inf}


@pytest.mark.parametrize("width", ["f", "d"])
def test_case_h5_nan_reaches_the_checks_and_its_error_can_be_encoded(width):
    number = {"f": b"\xca", "d": b"\xcb"}[width] + struct.pack(">" + width, math.nan)
    params = decode(b"\x81\xabtemperature" + number, SamplingParams)
    assert math.isnan(params.temperature)
    error = InvalidRequest(field="sampling.temperature", expected="a finite number", actual=params.temperature)
    assert b"nan" in encode({"actual": error.actual})


def test_case_c6_minus_infinity_in_a_reply():
    sample = SampleOutput(
        index=0,
        ids=np.array([4], "<u4"),
        logprobs=np.array([-0.1], "<f4"),
        logprob_definition="processed",
        spans=[Span(start=0, end=1, policy_version=3)],
        finish="length",
        seed=2**63 + 1,
        top_ids=np.array([[4, 9]], "<u4"),
        top_logprobs=np.array([[-0.1, -np.inf]], "<f4"),
    )
    group = GroupOutput(group_id="g", samples=[sample], prompt_tokens=2, hit=CacheHit(), policy_version=3)
    back = decode(encode(group), GroupOutput).samples[0]
    assert back.top_logprobs is not None and back.top_logprobs[0, 1] == -np.inf
    assert math.isfinite(back.logprobs[0]) and back.seed == 2**63 + 1 and back.matched is None


@pytest.mark.parametrize("ids", [[], [0], list(range(40)), [2**32 - 1, 0], [300] * 5000])
def test_ids_may_be_a_plain_list(ids):
    request = decode(group_body(prompt_ids=ids), GroupRequest)
    assert request.prompt_ids.dtype == np.uint32 and request.prompt_ids.tolist() == ids


@pytest.mark.parametrize("dtype", ["u1", "<i4", "<u4", "<i8", "<u8"])
def test_integer_arrays_become_uint32(dtype):
    request = decode(group_body(prompt_ids=pack_array(np.array([5, 7], dtype))), GroupRequest)
    assert request.prompt_ids.dtype == np.uint32 and request.prompt_ids.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        ([-1], "-1"),
        ([2**32], str(2**32)),
        ([2**63], str(2**63)),
        ([1, 1.5], "1.5"),
        (["7"], "'7'"),
        ([True], "True"),
        ([None], "None"),
        ([[1]], "[1]"),
        (7, "7"),
        (None, "NoneType"),
        (pack_array(np.array([1.0])), "float64"),
        (pack_array(np.array([1, -1])), "-1"),
        (pack_array(np.array([2**40])), str(2**40)),
        (pack_array(np.array([[1, 2]])), "[1, 2]"),
        (pack_array(np.array([1, 2], "<u2").view(BF16)), "void"),
    ],
)
def test_case_h1_bad_ids_are_refused_naming_field_and_value(bad, shown):
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(prompt_ids=bad), GroupRequest)
    assert refusal.value.field == "prompt_ids" and shown in str(refusal.value.actual)
    with pytest.raises(InvalidRequest) as refusal:
        decode(raw({"sequences": [[1], bad]}), ScoreRequest)
    assert refusal.value.field == "sequences[1]" and shown in str(refusal.value.actual)


@pytest.mark.parametrize("bad", [1.5, "7", True, None])
def test_case_h1_stop_ids_and_bias_keys(bad):
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(sampling={"stop_ids": [3, bad]}), GroupRequest)
    assert refusal.value.field == "sampling.stop_ids[1]"
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(sampling={"logit_bias": {bad: 1.0}}), GroupRequest)
    assert "sampling.logit_bias" in str(refusal.value.field)


@pytest.mark.parametrize("bad", [True, 1.5, "3", None])
def test_case_h3_top_alternatives_of_another_type(bad):
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(want={"top_logprobs": bad}), GroupRequest)
    assert refusal.value.field == "want.top_logprobs"


def test_unknown_missing_and_mistyped_fields_are_named():
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(sampling={"temprature": 1.0}), GroupRequest)
    assert (refusal.value.field, refusal.value.actual) == ("sampling.temprature", "'unknown field'")
    with pytest.raises(InvalidRequest) as refusal:
        decode(raw({"group_id": "g"}), GroupRequest)
    assert (refusal.value.field, refusal.value.actual) == ("prompt_ids", "'missing'")
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(n="many"), GroupRequest)
    assert (refusal.value.field, refusal.value.expected, refusal.value.actual) == ("n", "`int`", "'many'")
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(want={"logprobs": "best"}), GroupRequest)
    assert refusal.value.field == "want.logprobs" and "best" in str(refusal.value.actual)


def test_columns_take_their_dtype_or_are_refused():
    tensor = {"name": "w", "dtype": "F32", "shape": [1]}
    with pytest.raises(InvalidRequest) as refusal:
        decode(raw([tensor | {"data": pack_array(np.zeros(1, "<f4"))}]), list[NamedTensor])
    assert refusal.value.field == "[0].data"
    output = {"index": 0, "ids": [1], "logprob_definition": "raw", "spans": [], "finish": "stop", "seed": 0}
    half = pack_array(np.array([-0.5], "<f2"))
    assert decode(raw(output | {"logprobs": half}), SampleOutput).logprobs.dtype == np.float32
    with pytest.raises(InvalidRequest) as refusal:
        decode(raw(output | {"logprobs": half, "extra_logprobs": {"raw": [1]}}), SampleOutput)
    assert refusal.value.field == "extra_logprobs['raw']"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x03",
        b"\x63\x01\x01\x00\x00\x00\x00\x00",  # a dtype nobody knows
        b"\x03\xff" + bytes(2000),  # rank 255
        b"\x03\x01\x02\x00\x00\x00\x00\x00" + bytes(4),  # fewer bytes than announced
        b"\x03\x01\x01\x00\x00\x00\x00\x00" + bytes(8),  # more
        b"\x03\x01\x01\x00\x00\x00\x00\x07" + bytes(4),  # rubbish in the padding
        b"\x03\x08" + b"\xff" * 32 + bytes(6) + bytes(64),  # 2**256 elements
        b"\x03\x02" + b"\xff\xff\xff\xff\x00\x00\x00\x00" + bytes(6) + bytes(4),
    ],
)
def test_malformed_arrays_are_refused(content):
    with pytest.raises(InvalidRequest) as refusal:
        decode(group_body(prompt_ids=Ext(1, content)), GroupRequest)
    assert refusal.value.field == "prompt_ids"


def test_case_h8_text_that_is_not_unicode():
    for text in (b"\xa3\xed\xa0\xbd", b"\xa1\xff"):
        with pytest.raises(InvalidRequest):
            decode(b"\x82\xa8group_id" + text + b"\xaaprompt_ids\x91\x01", GroupRequest)
    with pytest.raises(InvalidRequest, match="surrogate"):
        encode({"text": "a\udc97b"})
    assert decode(encode("\U0001f378"), str) == "\U0001f378"
    assert decode(encode("e" + "\u0301" * 100_000), str) == "e" + "\u0301" * 100_000


def test_values_without_an_encoding_are_refused():
    for value in (object(), {"a": 2**70}, np.array(["x"]), np.zeros(3, complex)):
        with pytest.raises(InvalidRequest):
            encode(value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bodies_never_raise_anything_but_a_typed_error(data):
    body = bytearray(
        encode(
            GroupRequest(
                group_id="grüße",
                prompt_ids=np.arange(40, dtype="<u4"),
                sampling=SamplingParams(logit_bias={1: 2.0}, stop_ids=[5] * 90),
                want=Want(top_logprobs=3),
                resume=[
                    SampleResume(index=0, ids=np.array([1], "<u4"), spans=[Span(start=0, end=1, policy_version=1)])
                ],
            )
        )
    )
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    try:
        request = decode(bytes(body[:cut]), GroupRequest)
    except SparkrollError as error:
        assert error.field is not None
    else:
        assert request.prompt_ids.dtype == np.uint32


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_never_raises_anything_but_a_typed_error(noise):
    with pytest.raises(SparkrollError):
        decode(noise, GroupRequest)


def test_a_pickle_is_only_bytes(tmp_path):
    """case_n1: no field reaches an unpickler; the bytes are data or a refusal."""
    import pickle

    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    payload = pickle.dumps(Bomb())
    for value in (payload, Ext(1, payload), Ext(7, payload), payload.hex(), [payload]):
        with pytest.raises(SparkrollError):
            decode(group_body(prompt_ids=value), GroupRequest)
    assert not marker.exists()
    assert not hasattr(codec, "pickle")
