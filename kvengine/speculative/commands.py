"""`kvengine generate` and `kvengine bench speculate`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvengine.command_errors import readable_errors, writable
from kvengine.errors import EvaluationError

if TYPE_CHECKING:
    from kvengine.speculative import bench
    from kvengine.speculative.check import Gamma

bench_app = typer.Typer(help="Measure speed.", no_args_is_help=True)
console = Console()
COLDEST = 1e-30  # logits are some hundreds, and float32 ends at 3e38

Model = Annotated[str, typer.Argument(help="folder or hub id of the model, or 'bundled'")]
Draft = Annotated[str, typer.Option(help="lookup, recycling, none, or a small model: folder, hub id, 'bundled-draft'")]
Steps = Annotated[str, typer.Option(help="'auto', or tokens drafted for the middle and for the target: 1,6")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")]
New = Annotated[int, typer.Option("--new", min=1, help="new tokens")]


def generate(
    context: typer.Context,
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="text to continue; by default standard input")] = None,
    policy: Annotated[str, typer.Option(help="the cache's policy")] = "full",
    speculate: Annotated[
        bool, typer.Option("--speculate/--plain", help="draft and verify; same law of the text")
    ] = False,
    draft: Draft = "lookup",
    middle: Annotated[str, typer.Option(help="policy under which the model drafts for itself, or none")] = "none",
    gamma: Steps = "auto",
    new: New = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: all")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="end at this text (may be repeated)")] = None,
    seed: Annotated[int | None, typer.Option(min=-(1 << 63), max=(1 << 64) - 1, help="of sampling")] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="print what it cost")] = False,
    record: Annotated[bool, typer.Option("--record/--no-record", help="on a GPU, record a step and replay it")] = False,
    fuse: Annotated[
        bool, typer.Option("--fuse/--no-fuse", help="fuse what a recorded step does beside attention")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Continue a text, printing as it goes."""
    with readable_errors():
        check_together(context, speculate, report, record, fuse, temperature)
        if stop and "" in stop:
            raise EvaluationError("--stop has no text to end at; leave it out, or give some")
        check_temperature(temperature)
        drafted = steps(gamma)
        import torch
        from transformers import TextStreamer

        from kvengine.hf import patch
        from kvengine.speculative.triforce import TriForce
        from kvengine.stack import Stack

        middle_policy = named(middle)
        Stack.parse(policy)  # this and the prompt before the model, which may take minutes to load
        text = given(prompt)
        target, tokenizer = load(model, device, dtype)
        ids = tokenizer(text, return_tensors="pt").input_ids
        if not ids.numel():
            raise EvaluationError("the prompt has no token; give some text to continue")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[no-untyped-call,unused-ignore]
        options: dict[str, Any] = {"max_new_tokens": new, "streamer": streamer}
        options |= {"stop_strings": stop, "tokenizer": tokenizer} if stop else {}
        options |= {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature else {"do_sample": False}
        if not speculate:
            if seed is not None:
                torch.manual_seed(seed)
            sampling = {"do_sample": True} if temperature else {}
            patch(target, policy, record, fuse)
            target.generate(ids.to(target.device), **options, **sampling)
            return
        decoder = TriForce(
            target, drafter(draft, device, dtype, target, tokenizer), middle_policy, drafted, stack=policy
        )
        decoder.generate(ids.to(target.device), seed=seed, **options)
        if report:
            console.print(str(decoder.report), highlight=False, markup=False)


def check_together(
    context: typer.Context, speculate: bool, report: bool, record: bool, fuse: bool, temperature: float
) -> None:
    """Refuse options that would do nothing without another, or beside it."""
    if report and not speculate:
        raise EvaluationError("--report counts drafts; it needs --speculate")
    if record and speculate:
        raise EvaluationError("--record is for steps of one token; leave out --speculate")
    if fuse and not record:
        raise EvaluationError("--fuse says how a step is recorded; it needs --record")
    if (said := typed(context, "draft", "middle", "gamma")) and not speculate:
        raise EvaluationError(f"{said[0]} says how to draft; it needs --speculate")
    if (said := typed(context, "top_p", "top_k")) and not temperature:
        raise EvaluationError(f"{said[0]} says what may be drawn; it needs --temperature above 0")


def check_temperature(temperature: float) -> None:
    """Refuse what makes infinities of logits that are divided by it, and of these no law."""
    if 0 < temperature < COLDEST:
        raise EvaluationError(f"--temperature {temperature} is too near 0 to divide by; give 0 for the likeliest token")


def typed(context: typer.Context, *names: str) -> list[str]:
    """Those of the options that the user gave."""
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return [f"--{name.replace('_', '-')}" for name in given]


@bench_app.command("speculate")
def speculate(
    model: Model,
    text: Annotated[Path, typer.Option(help="text file that prompts are cut from", exists=True, dir_okay=False)],
    draft: Draft = "lookup",
    middle: Annotated[
        str, typer.Option(help="policies under which the model drafts for itself, separated by ';', or none")
    ] = "none;retrieval(budget=0.125);streaming(recent=0.125);snapkv(budget=0.125);kivi(bits=4)",
    contexts: Annotated[str, typer.Option(help="prompt lengths in tokens, separated by commas")] = "1024,4096",
    gamma: Steps = "1,6",
    prompts: Annotated[int, typer.Option(min=1, help="prompts of each length")] = 4,
    new: New = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="folder for rows (JSON), table (Markdown) and picture (PNG)")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Speculative against plain decoding: acceptance, costs, and the speed-up measured and predicted."""
    with readable_errors():
        lengths = numbers(contexts)
        check_temperature(temperature)
        if new < 2:
            raise EvaluationError(
                "--new 1 measures prompts only: the first token of each costs no pass; give 2 or more"
            )
        if min(lengths) < 1:
            raise EvaluationError(f"--contexts are lengths of prompts, 1 or more, not {contexts!r}")
        if out is not None:
            writable(out)
        drafted = steps(gamma)
        from kvengine.speculative import bench

        middles = [named(name.strip()) for name in middle.split(";")]
        target, tokenizer = load(model, device, dtype)
        tokens = tokenizer(contents(text), verbose=False).input_ids
        below = drafter(draft, device, dtype, target, tokenizer)
        settings = [bench.Setting(below, one, drafted) for one in middles]
        sampling = {"temperature": temperature} if temperature else {}
        found: list[bench.Result] = []
        if len(tokens) < max(lengths):
            raise EvaluationError(f"{text} has {len(tokens)} tokens, fewer than a context of {max(lengths)}")
        for context in lengths:
            cut = [ids.to(target.device) for ids in bench.windows(tokens, context, prompts)]
            found += bench.compare(target, cut, settings, new, status, **sampling)
            if out is not None:
                save(found, out, model)  # of each length at once: the next may be interrupted
        console.print(tables(found), highlight=False, markup=False, soft_wrap=True)
        if out is not None:
            console.print(f"{out}/speculate.json, .md, .png", highlight=False, markup=False)


def tables(found: list[bench.Result]) -> str:
    """What it was worth; then acceptance by place, bytes and seconds by phase."""
    from kvengine.speculative import bench

    return bench.table(found) + "\n" + bench.table(found, bench.DETAILS)


def save(found: list[bench.Result], out: Path, model: str) -> None:
    from kvengine.speculative import bench

    document = bench.document(found, " ".join(["kvengine", *sys.argv[1:]])) | {"model": model}
    (out / "speculate.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "speculate.md").write_text(tables(found))
    bench.plot(found, out / "speculate.png")


def given(prompt: str | None) -> str:
    """The prompt, or standard input. Raises EvaluationError for what is not text."""
    try:
        if prompt is None and sys.stdin is None:
            raise EvaluationError("there is no prompt, and standard input is closed; give some text to continue")
        text = sys.stdin.read() if prompt is None else prompt
        text.encode()  # bytes that are no UTF-8 arrive as halves of surrogate pairs
    except UnicodeError as error:
        raise EvaluationError("the prompt is not UTF-8 text; convert it first") from error
    return text


def contents(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{file} cannot be read as UTF-8 text: {error}") from error


def status(text: str) -> None:
    print(text, file=sys.stderr)


BUNDLED = {"bundled": "bundled_model", "bundled-draft": "draft_model"}


def place(name: str) -> str:
    """Where a model is: the bundled ones come with the evaluation, a layer above this one, so they are asked for late."""
    return str(getattr(importlib.import_module("kvengine.evals"), BUNDLED[name])()) if name in BUNDLED else name


def load(name: str, device: str, dtype: str) -> tuple[Any, Any]:
    """A model, ready to decode, and its tokenizer. Raises EvaluationError if there is none, or no such device."""
    loading: Any = importlib.import_module("kvengine.evals.loading")
    return loading.load(place(name), device=device, dtype=dtype)


def drafter(name: str, device: str, dtype: str, target: Any, tokenizer: Any) -> Any:
    """What drafts for a model. Raises ModelError for a small one that has another tokenizer."""
    if name in ("lookup", "recycling"):
        return name
    if name == "none":
        return None
    from kvengine.speculative.check import check_tokenizers

    model, its = load(name, device, dtype)
    check_tokenizers(target, model, (tokenizer, its))
    return model


def named(policy: str) -> str | None:
    """A middle's policy, None for "none". Raises PolicyError."""
    from kvengine.stack import Stack

    if policy == "none":
        return None
    Stack.parse(policy)
    return policy


def steps(text: str) -> Gamma:
    if text == "auto":
        return "auto"
    found = numbers(text)
    if len(found) != 2:
        raise EvaluationError(f"--gamma is 'auto' or two numbers such as 1,6, not {text!r}")
    return found[0], found[1]


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise EvaluationError(f"{text!r} is not a list of whole numbers separated by commas") from error
