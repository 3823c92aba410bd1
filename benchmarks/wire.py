"""The rollout wire: bytes, encoding and decoding of a large group, beside JSON as peers send it.

    python -m benchmarks.wire [--json FILE]

The body is a `generate_group` reply of 16 samples × 8,192 tokens of id and log-probability, with
its limits checked and its schema validated on the way in. Times are the best of many runs in one
thread. JSON rows build [log-probability, id, null] triples, the shape of SGLang's
`output_token_logprobs`, and read them back into arrays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import Row, at_most, report
from engine.types import CacheHit, GroupOutput, SampleDelta, SampleOutput, Span
from rollout.codec import decode, encode
from rollout.frames import FrameLog, FrameReader, FrameType
from rollout.protocol import Delta, Origin, Reply
from rollout.wire_limits import check_structure

SAMPLES, TOKENS, VOCABULARY = 16, 8192, 151_936
DELTA_TOKENS = 16


def group_reply() -> Reply[GroupOutput]:
    rng = np.random.default_rng(0)
    samples = [
        SampleOutput(
            index=i,
            ids=rng.integers(0, VOCABULARY, TOKENS).astype(np.uint32),
            logprobs=-rng.exponential(1.0, TOKENS).astype(np.float32),
            logprob_definition="processed",
            spans=[Span(start=0, end=TOKENS, policy_version=7)],
            finish="length",
            seed=int(rng.integers(0, 2**63)),
        )
        for i in range(SAMPLES)
    ]
    group = GroupOutput(group_id="group-0", samples=samples, prompt_tokens=512, hit=CacheHit(), policy_version=7)
    return Reply(result=group, origin=Origin(engine_id="engine-0", incarnation=1, policy_version=7))


def best_ms(work: Callable[[], Any], seconds: float = 1.5) -> float:
    """Fastest of as many runs as fit in `seconds` (at least 3)."""
    best, end, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
        runs += 1
    return best * 1e3


def triples(group: GroupOutput) -> list[dict[str, Any]]:
    items = []
    for sample in group.samples:
        pairs = zip(sample.logprobs.tolist(), sample.ids.tolist(), strict=True)
        meta = {
            "id": f"{group.group_id}/{sample.index}",
            "finish_reason": {"type": sample.finish},
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        }
        items.append({"output_ids": sample.ids.tolist(), "meta_info": meta})
    return items


def columns(group: GroupOutput) -> list[dict[str, Any]]:
    return [{"ids": sample.ids.tolist(), "logprobs": sample.logprobs.tolist()} for sample in group.samples]


def arrays_of_triples(items: list[dict[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    found = []
    for item in items:
        rows = item["meta_info"]["output_token_logprobs"]
        found.append((np.array([r[1] for r in rows], "u4"), np.array([r[0] for r in rows], "f4")))
    return found


def arrays_of_columns(items: list[dict[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.array(item["ids"], "u4"), np.array(item["logprobs"], "f4")) for item in items]


def column_rows(reply: Reply[GroupOutput]) -> list[Row]:
    body = encode(reply)
    back = decode(body, Reply[GroupOutput])
    for sent, received in zip(reply.result.samples, back.result.samples, strict=True):
        assert sent.ids.tobytes() == received.ids.tobytes(), "ids must survive bit for bit"
        assert sent.logprobs.tobytes() == received.logprobs.tobytes(), "log-probabilities must survive bit for bit"
    case = f"sparkroll, {SAMPLES} x {TOKENS} tokens"
    return [
        at_most(case, "bytes per token", len(body) / (SAMPLES * TOKENS), "B", 8.1),
        at_most(case, "encode", best_ms(lambda: encode(reply)), "ms", 1.0),
        at_most(case, "decode to arrays, checked", best_ms(lambda: decode(body, Reply[GroupOutput])), "ms", 0.5),
        Row(case, "of which limits", best_ms(lambda: check_structure(body)), "ms"),
    ]


def json_rows(reply: Reply[GroupOutput]) -> list[Row]:
    group = reply.result
    layouts = [
        ("json (stdlib), triples", triples, arrays_of_triples, lambda value: json.dumps(value).encode(), json.loads),
        ("json (msgspec), triples", triples, arrays_of_triples, msgspec.json.encode, msgspec.json.decode),
        ("json (msgspec), columns", columns, arrays_of_columns, msgspec.json.encode, msgspec.json.decode),
        ("msgpack, plain lists", columns, arrays_of_columns, msgspec.msgpack.encode, msgspec.msgpack.decode),
    ]
    rows = []
    for case, build, read, dump, load in layouts:
        body = dump(build(group))
        rows += [
            Row(case, "bytes per token", len(body) / (SAMPLES * TOKENS), "B"),
            Row(case, "encode", best_ms(lambda b=build, d=dump: d(b(group))), "ms"),
            Row(case, "decode to arrays", best_ms(lambda r=read, ld=load, body=body: r(ld(body))), "ms"),
        ]
    return rows


def deltas(reply: Reply[GroupOutput]) -> list[Delta]:
    """The group as a stream: every sample `DELTA_TOKENS` tokens further in each event."""
    events = []
    for start in range(0, TOKENS, DELTA_TOKENS):
        end = start + DELTA_TOKENS
        parts = [
            SampleDelta(
                index=sample.index,
                start=start,
                ids=sample.ids[start:end],
                logprobs=sample.logprobs[start:end],
                spans=[Span(start=start, end=end, policy_version=7)],
            )
            for sample in reply.result.samples
        ]
        events.append(Delta(samples=parts))
    return events


async def send_all(events: list[Delta]) -> bytes:
    log = FrameLog(2**30)
    for event in events:
        await log.append(FrameType.DELTA, encode(event))
    await log.append(FrameType.GROUP_END, b"\x80")
    return b"".join([chunk async for chunk in log.read(0, 10.0)])


def receive_all(data: bytes) -> int:
    reader = FrameReader()
    tokens = 0
    for start in range(0, len(data), 65_536):
        for frame in reader.feed(data[start : start + 65_536]):
            if frame.type == FrameType.DELTA:
                tokens += sum(len(part.ids) for part in decode(frame.body, Delta).samples)
    return tokens


def stream_rows(reply: Reply[GroupOutput]) -> list[Row]:
    events = deltas(reply)
    data = asyncio.run(send_all(events))
    assert receive_all(data) == SAMPLES * TOKENS, "every token must arrive"
    case = f"stream, {len(events)} frames of {SAMPLES} x {DELTA_TOKENS} tokens"
    return [
        Row(case, "bytes per token", len(data) / (SAMPLES * TOKENS), "B"),
        Row(case, "encode per frame", best_ms(lambda: asyncio.run(send_all(events))) / len(events), "ms"),
        Row(case, "decode per frame", best_ms(lambda: receive_all(data)) / len(events), "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the closing JSON line to this file too")
    arguments = parser.parse_args()
    reply = group_reply()
    report("wire", column_rows(reply) + json_rows(reply) + stream_rows(reply), arguments.json)


if __name__ == "__main__":
    main()
