"""`kvengine generate` and `kvengine bench speculate`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Collection
from functools import partial
from math import inf
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
Speculate = Annotated[
    bool,
    typer.Option("--speculate/--plain", help="draft cheaply and let the model verify: faster, the text keeps its law"),
]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="draw among the likeliest that make up this share")]
Seed = Annotated[
    int | None,
    typer.Option(min=-(1 << 63), max=(1 << 64) - 1, metavar="NUMBER", help="of drawing: with it, the same text again"),
]
JudgeEvery = Annotated[
    int | None,
    typer.Option(
        min=2, metavar="TOKENS", help="read the prompt in parts, each judged before the next: memory has a bound"
    ),
]
Fuse = Annotated[bool, typer.Option("--fuse/--no-fuse", help="fuse what a recorded step does beside attention")]
New = Annotated[int, typer.Option("--new", min=1, help="new tokens")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="folder for rows (JSON), table (Markdown) and picture (PNG); those of an earlier run are replaced"
    ),
]


def generate(
    context: typer.Context,
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="text to continue; by default standard input")] = None,
    policy: Annotated[str, typer.Option(help="the cache's policy, as 'snapkv(budget=1024) + kivi(bits=4)'")] = "full",
    speculate: Speculate = False,
    draft: Draft = "lookup",
    middle: Annotated[str, typer.Option(help="policy under which the model drafts for itself, or none")] = "none",
    gamma: Steps = "auto",
    new: New = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token")] = 0.0,
    top_p: TopP = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="draw among so many of the likeliest; 0: among all")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="end at this text (may be repeated)")] = None,
    seed: Seed = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="say on standard error what it cost")] = False,
    record: Annotated[bool, typer.Option("--record/--no-record", help="on a GPU, record a step and replay it")] = False,
    fuse: Fuse = False,
    judge_every: JudgeEvery = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Continue a text, printing as it goes."""
    with readable_errors():
        check_together(context, speculate, report, record, fuse, temperature)
        check_words(speculate, draft, middle, stop or ())
        check_law(temperature, top_p)
        check_prompt(prompt)
        drafted = steps(gamma)
        import torch
        from transformers import TextStreamer

        from kvengine.hf.patching import patch
        from kvengine.speculative.triforce import TriForce
        from kvengine.stack import Stack

        middle_policy = named(middle)
        Stack.parse(policy)  # this and the prompt before the model, which may take minutes to load
        text = given(prompt)
        target, tokenizer = load(model, device, dtype)
        ids = tokenizer(text, return_tensors="pt").input_ids
        check_tokens(target, ids.shape[1], new)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[no-untyped-call,unused-ignore]
        options: dict[str, Any] = {"max_new_tokens": new, "streamer": streamer}
        options["attention_mask"] = torch.ones_like(ids).to(target.device)  # a prompt may speak of the padding token
        options |= {"stop_strings": stop, "tokenizer": tokenizer} if stop else {}
        options |= {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature else {"do_sample": False}
        if not speculate:
            if seed is not None:
                torch.manual_seed(seed)
            sampling = {"do_sample": True} if temperature else {}
            patch(target, policy, record, fuse, judge_every)
            target.generate(ids.to(target.device), **options, **sampling)
            return
        below = drafter(draft, device, dtype, target, tokenizer)
        decoder = TriForce(target, below, middle_policy, drafted, stack=policy)
        # Coupled: the text of a seed must not depend on how much is drafted, which "auto" decides by the clock.
        decoder.generate(ids.to(target.device), seed=seed, coupled=seed is not None and drafted == "auto", **options)
        if report:
            Console(stderr=True).print(str(decoder.report), highlight=False, markup=False)


def check_together(
    context: typer.Context, speculate: bool, report: bool, record: bool, fuse: bool, temperature: float
) -> None:
    """Refuse options that would do nothing without another, or beside it."""
    if report and not speculate:
        raise EvaluationError("--report counts drafts; it needs --speculate")
    if record and speculate:
        raise EvaluationError("--record is for steps of one token; leave out --speculate")
    if speculate and typed(context, "judge_every"):
        raise EvaluationError(
            "--judge-every reads a prompt in parts, and drafts are judged by a whole one; leave one out"
        )
    if fuse and not record:
        raise EvaluationError("--fuse says how a step is recorded; it needs --record")
    if (said := typed(context, "draft", "middle", "gamma")) and not speculate:
        raise EvaluationError(f"{said[0]} says how to draft; it needs --speculate")
    if (said := typed(context, "top_p", "top_k", "seed")) and not temperature:
        raise EvaluationError(f"{said[0]} says what may be drawn; it needs --temperature above 0")


def check_words(speculate: bool, draft: str, middle: str, stop: Collection[str]) -> None:
    """Refuse to draft by nothing, and to end at nothing."""
    if speculate and (draft, middle) == ("none", "none"):
        raise EvaluationError("nothing drafts: give --draft or --middle, or leave out --speculate")
    if "" in stop:
        raise EvaluationError("--stop has no text to end at; leave it out, or give some")


def check_prompt(prompt: str | None) -> None:
    """Refuse to wait for text from nowhere, before anything is loaded that takes seconds."""
    if prompt is None and sys.stdin is None:
        raise EvaluationError("there is no prompt, and standard input is closed; give some text to continue")


def check_law(temperature: float, top_p: float = 1.0) -> None:
    """Refuse what is no number, and what makes infinities of logits that are divided by it, and of these no law."""
    if not (temperature == 0 or COLDEST <= temperature < inf):
        raise EvaluationError(
            f"--temperature {temperature} cannot be divided by; give 0 for the likeliest token, or a number above 0"
        )
    if not 0 <= top_p <= 1:
        raise EvaluationError(f"--top-p {top_p} is no share; give a number from 0 to 1")


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
    out: Out = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Speculative against plain decoding: acceptance, costs, and the speed-up measured and predicted."""
    with readable_errors():
        lengths = prompt_lengths(contexts)
        check_law(temperature)
        if new < 2:
            raise EvaluationError(
                "--new 1 measures prompts only: the first token of each costs no pass; give 2 or more"
            )
        drafted, middles = steps(gamma), [named(name.strip()) for name in middle.split(";")]
        if draft == "none":
            middles = [one for one in middles if one is not None]  # that would be plain decoding, which is there anyhow
        if not middles:
            raise EvaluationError("nothing drafts: give --draft or --middle")
        from kvengine.speculative import bench

        with writable(out):
            target, tokenizer = load(model, device, dtype)
            tokens = tokenizer(contents(text), verbose=False).input_ids
            if len(tokens) < max(lengths):
                raise EvaluationError(f"{text} has {len(tokens)} tokens, fewer than a context of {max(lengths)}")
            check_room(target, max(lengths), new - 1)  # nobody reads the last one
            below = drafter(draft, device, dtype, target, tokenizer)
            settings = [bench.Setting(below, one, drafted) for one in middles]
            sampling = {"temperature": temperature} if temperature else {}
            compare(target, {length: bench.windows(tokens, length, prompts) for length in lengths}, settings, new, prompts,
                    sampling, out, model)  # fmt: skip


def compare(
    target: Any,
    cut: dict[int, list[bench.Ids]],
    settings: list[bench.Setting],
    new: int,
    asked: int,
    sampling: dict[str, float],
    out: Path | None,
    name: str,
) -> None:
    """All lengths, and the files after each: the next may be interrupted. What was measured is shown then too."""
    from kvengine.speculative import bench

    found: list[bench.Result] = []
    try:
        for length, prompts in cut.items():
            if len(prompts) < asked:
                status(f"{length} tokens: the text has room for {len(prompts)} different prompts, not for {asked}")
            there = [ids.to(target.device) for ids in prompts]
            found += bench.compare(target, there, settings, new, status, **sampling)
            if out is not None:
                save(found, out, name, target)
    finally:
        if found:
            console.print(tables(found), highlight=False, markup=False, soft_wrap=True)
        if found and out is not None:
            console.print(f"{out}/speculate.json, .md, .png", highlight=False, markup=False)


def tables(found: list[bench.Result]) -> str:
    """What it was worth; then acceptance by place, bytes and seconds by phase."""
    from kvengine.speculative import bench

    return bench.table(found) + "\n" + bench.table(found, bench.DETAILS)


def save(found: list[bench.Result], out: Path, name: str, model: Any) -> None:
    """Each file as a whole: one of an earlier run is there until then."""
    from kvengine.offload.stores.filesystem import replace_file
    from kvengine.speculative import bench

    document = bench.document(found, bench.command_line()) | {"model": name, **bench.conditions(model)}
    replace_file(out / "speculate.json", (json.dumps(document, indent=1) + "\n").encode())
    replace_file(out / "speculate.md", tables(found).encode())
    replace_file(out / "speculate.png", bench.png(partial(bench.plot, found)))


def given(prompt: str | None) -> str:
    """The prompt, or standard input. Raises EvaluationError for what is not text."""
    try:
        if prompt is None and sys.stdin.isatty():
            status("type the text to continue, and Ctrl-D on a line of its own")
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


def prompt_lengths(text: str) -> list[int]:
    """Lengths of prompts, each once."""
    found = list(dict.fromkeys(numbers(text)))
    if min(found) < 1:
        raise EvaluationError(f"--contexts are lengths of prompts, 1 or more, not {text!r}")
    return found


def check_tokens(model: Any, prompt: int, new: int) -> None:
    """Raises EvaluationError for a prompt of no token, and where a model has a vector for each position, and none for so many."""
    if not prompt:
        raise EvaluationError("the prompt has no token; give some text to continue")
    most = importlib.import_module("kvengine.evals.manifest").position_table(model)
    if most is not None and prompt + new - 1 > most:  # nobody reads the last one
        raise EvaluationError(
            f"the model has learned {most} positions, and the prompt's {prompt} tokens and {new} new ones are more; give a "
            "shorter prompt, or a smaller --new"
        )


def check_room(model: Any, length: int, more: int) -> None:
    """Raises EvaluationError where positions would end."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length + more > limit:
        raise EvaluationError(
            f"the model has {limit} positions, fewer than a context of {length} and {more} tokens after it; give shorter "
            "--contexts, or a configuration with more"
        )


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise EvaluationError(f"{text!r} is not a list of whole numbers separated by commas") from error
