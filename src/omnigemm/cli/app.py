"""The commands and their options. What each one does is in the module of its name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import OmniGemmError
from . import output

app = typer.Typer(
    name="omnigemm",
    help="Every matrix product of a language model, at low precision, on the machine that is there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(
    help="The folder of compiled kernels and measured tables.",
    no_args_is_help=True,
    epilog="""\b
Examples:
  omnigemm cache list
  omnigemm cache clear --yes""",
)
app.add_typer(cache_app, name="cache")

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
# What a product is, beside its operation and its sizes.
Dtype = Annotated[str | None, typer.Option(help="Type of the activations: fp16, bf16, fp32, int8, e4m3, e5m2.")]
WeightDtype = Annotated[str | None, typer.Option(help="Type of the weights, where it differs: int4, e4m3, e5m2.")]
OutDtype = Annotated[str | None, typer.Option(help="Type of the result: fp16, bf16, fp32.")]
Granularity = Annotated[str | None, typer.Option(help="Scales of 8-bit operands: tensor, token, 1x128, 128x128.")]
GroupSize = Annotated[
    int | None, typer.Option(help="Columns that share a scale of int4 weights: 32, 64, 128, or -1 for all.")
]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="With zero points.")]
ActOrder = Annotated[bool, typer.Option("--act-order", help="int4 weights with reordered columns.")]
Bias = Annotated[bool, typer.Option("--bias", help="A bias is added.")]
AddsC = Annotated[bool, typer.Option("--c", help="C is added: beta is not 0.")]
ALayout = Annotated[
    str | None, typer.Option(help="How A lies: row for [M, K], which is usual; col for the transpose of a [K, M].")
]
BLayout = Annotated[
    str | None, typer.Option(help="How B of gemm lies: row for [K, N], which is usual; col for a weight [N, K].")
]
Batch = Annotated[int | None, typer.Option(help="Matrices in the batch.")]
Groups = Annotated[int | None, typer.Option(help="Groups of a grouped operation. Default: 8, of lists 1.")]
ExpectedM = Annotated[int | None, typer.Option(help="Rows that a masked group is expected to have.")]


def run(args: Sequence[str] | None = None) -> None:
    """The whole program: errors of the library and of the system become one line and exit code 2."""
    from ..backends.cpu.isa import shield_onednn

    shield_onednn()
    try:
        output.check_streams()
        app(args=None if args is None else list(args), prog_name="omnigemm")
    except OmniGemmError as error:
        output.print_error(str(error))
    except OSError as error:
        # Commands say what they could not do; this is met by what others print, such as --help.
        output.print_error(str(error))
        output.give_up_stdout()
    sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        output.print_line(f"omnigemm {__version__}")
        raise typer.Exit()


@app.callback(
    epilog="""\b
Examples:
  omnigemm doctor
  omnigemm demo
  omnigemm explain int4_gemm 16 4096 4096"""
)
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Every matrix product of a language model, at low precision, on the machine that is there."""


@app.command(
    epilog="""\b
Examples:
  omnigemm doctor
  omnigemm doctor --json"""
)
def doctor(as_json: Json = False) -> None:
    """Look at this machine: versions, instruction sets, backends, settings, and a self-check of every operation.

    Exits with 1 when a self-check fails.
    """
    from .doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


@app.command(
    epilog="""\b
Examples:
  omnigemm explain int4_gemm 16 4096 4096 --dtype fp16
  omnigemm explain fp8_gemm 1024 4096 7168 --granularity 128x128 --json
  omnigemm explain grouped_gemm_masked 64 2048 4096 --groups 16
  omnigemm explain fp8_gemm 16 4096 7168 --gpu h200"""
)
def explain(
    op: Annotated[str, typer.Argument(help="The operation, such as gemm, int8_gemm or grouped_gemm_masked.")],
    m: Annotated[int, typer.Argument(help="Rows of the activations.")],
    n: Annotated[int, typer.Argument(help="Columns of the result.")],
    k: Annotated[int, typer.Argument(help="The dimension that is summed over.")],
    dtype: Dtype = None,
    weight_dtype: WeightDtype = None,
    out_dtype: OutDtype = None,
    granularity: Granularity = None,
    group_size: GroupSize = None,
    asymmetric: Asymmetric = False,
    act_order: ActOrder = False,
    bias: Bias = False,
    c: AddsC = False,
    a_layout: ALayout = None,
    b_layout: BLayout = None,
    batch: Batch = None,
    groups: Groups = None,
    expected_m: ExpectedM = None,
    device: Annotated[str | None, typer.Option(help="Where the tensors are. Default: cpu.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask this backend only.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Ask for a GPU that need not be here: h200, h100.")] = None,
    as_json: Json = False,
) -> None:
    """Say which kernel would run a product, and why each other one would not."""
    from .explain import run_explain

    words = {
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "out_dtype": out_dtype,
        "granularity": granularity,
        "group_size": group_size,
        "asymmetric": asymmetric,
        "act_order": act_order,
        "bias": bias,
        "c": c,
        "a_layout": a_layout,
        "b_layout": b_layout,
        "batch": batch,
        "groups": groups,
        "expected_m": expected_m,
    }
    raise typer.Exit(run_explain(op, m, n, k, words, device=device, backend=backend, gpu=gpu, as_json=as_json))


@app.command(
    epilog="""\b
Examples:
  omnigemm bench --op int4_gemm --shape 1x4096x4096 --shape 16x4096x4096
  omnigemm bench --op grouped_gemm_masked --shape G8x16x1024x2048
  omnigemm bench --op fp8_gemm --granularity token --json --record run.json"""
)
def bench(
    op: Annotated[list[str] | None, typer.Option(help="Operation; repeat for several. Default: all.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="MxNxK, or G<groups>xMxNxK with M rows per group; repeat for several."),
    ] = None,
    dtype: Dtype = None,
    weight_dtype: WeightDtype = None,
    granularity: Granularity = None,
    group_size: GroupSize = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each row, after warm-up.")] = 1.0,
    cold_mb: Annotated[int, typer.Option(min=0, help="Copies of each weight to cycle through, together, in MB.")] = 256,
    record: Annotated[Path | None, typer.Option(help="Also write the record to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Time operations against torch on this machine, in turns within one run."""
    from .bench import run_bench

    words = {
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "granularity": granularity,
        "group_size": group_size,
    }
    raise typer.Exit(
        run_bench(
            op or [],
            shape or [],
            words,
            seconds=seconds,
            cold_mb=cold_mb,
            record_file=record,
            as_json=as_json,
        )
    )


@app.command(
    epilog="""\b
Examples:
  omnigemm demo
  omnigemm demo --out report.html
  omnigemm demo --json > demo.json"""
)
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the HTML report.")] = Path("omnigemm-report.html"),
    quick: Annotated[bool, typer.Option("--quick", hidden=True, help="Small shapes, for tests.")] = False,
    as_json: Json = False,
) -> None:
    """Quantise, multiply and verify with every operation, time it against torch, and write a report.

    Takes about half a minute. Exits with 1 when a result is wrong.
    """
    from .demo import run_demo

    raise typer.Exit(run_demo(out, quick=quick, as_json=as_json))


@app.command(
    epilog="""\b
Examples:
  omnigemm warm fp8_gemm --shape 16x4096x7168 --shape 4096x4096x7168
  omnigemm warm fp8_gemm --shape 1-64x4096x7168 --granularity 128x128 --gpu h200
  omnigemm warm --file problems.txt --jobs 4 --json"""
)
def warm(
    op: Annotated[str | None, typer.Argument(help="The operation, such as fp8_gemm.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="MxNxK; M may be a range, such as 1-64, for every number of rows in it. Repeat for several."),
    ] = None,
    dtype: Dtype = None,
    weight_dtype: WeightDtype = None,
    out_dtype: OutDtype = None,
    granularity: Granularity = None,
    group_size: GroupSize = None,
    asymmetric: Asymmetric = False,
    act_order: ActOrder = False,
    bias: Bias = False,
    c: AddsC = False,
    a_layout: ALayout = None,
    b_layout: BLayout = None,
    batch: Batch = None,
    groups: Groups = None,
    expected_m: ExpectedM = None,
    constant_weights: Annotated[
        bool, typer.Option("--constant-weights", help="For calls with the setting of that name.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="A problem in each line, such as: fp8_gemm 16 4096 7168 granularity=token")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Compile for: h200, h100. Default: the GPU that is here, or else h200.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Kernels at a time. Default: one per processor.")] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels of products ahead. No GPU is needed.

    Exits with 1 when a kernel does not compile, or cannot be kept, or a product has none.
    """
    from .warm import run_warm

    words = {
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "out_dtype": out_dtype,
        "granularity": granularity,
        "group_size": group_size,
        "asymmetric": asymmetric,
        "act_order": act_order,
        "bias": bias,
        "c": c,
        "a_layout": a_layout,
        "b_layout": b_layout,
        "batch": batch,
        "groups": groups,
        "expected_m": expected_m,
    }
    raise typer.Exit(
        run_warm(
            op,
            shape or [],
            words,
            file=file,
            gpu=gpu,
            jobs=jobs,
            constant_weights=constant_weights,
            as_json=as_json,
        )
    )


@app.command(
    epilog="""\b
Examples:
  omnigemm tune fp8_gemm --n 4096 --k 7168 --m 1 --m 64
  omnigemm tune fp8_gemm --shape 1-64x4096x7168 --granularity token
  omnigemm tune gemm --n 5120 --k 13824 --m 4096 --b-layout col
  omnigemm tune --file problems.txt --json
  omnigemm tune fp8_gemm --n 4096 --k 7168 --m 1 --dry-run"""
)
def tune(
    op: Annotated[str | None, typer.Argument(help="The operation: fp8_gemm, int8_gemm, gemm.")] = None,
    n: Annotated[int | None, typer.Option(help="Columns of the result.")] = None,
    k: Annotated[int | None, typer.Option(help="The dimension that is summed over.")] = None,
    m: Annotated[
        list[str] | None, typer.Option(help="Rows, or a range of them, such as 1-64; repeat for several.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="MxNxK instead; M may be a range. Repeat for several.")
    ] = None,
    granularity: Granularity = None,
    b_layout: BLayout = None,
    file: Annotated[
        Path | None, typer.Option(help="A problem in each line, such as: fp8_gemm 16 4096 7168 granularity=token")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Configs that are tried: the model's best.")] = 32,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the configs that would be tried. No GPU is needed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure which config of a kernel is fastest on the GPU that is here, and keep it for calls to come.

    Takes some seconds for each product, in which nothing else should use the GPU. Exits with 1 when a product fails or
    cannot be tuned.
    """
    from .tune import run_tune, shapes_of

    words = {"granularity": granularity, "b_layout": b_layout}
    shapes = [*(shape or []), *shapes_of(n, k, m or [])]
    raise typer.Exit(run_tune(op, shapes, words, file=file, candidates=candidates, dry_run=dry_run, as_json=as_json))


@cache_app.command(
    "path",
    epilog="""\b
Example:
  omnigemm cache path""",
)
def cache_path(as_json: Json = False) -> None:
    """Print the folder of compiled kernels and measured tables."""
    from .cache import run_path

    raise typer.Exit(run_path(as_json=as_json))


@cache_app.command(
    "list",
    epilog="""\b
Example:
  omnigemm cache list --json""",
)
def cache_list(as_json: Json = False) -> None:
    """List the compiled kernels with their architecture, size and age, and the measured tables."""
    from .cache import run_list

    raise typer.Exit(run_list(as_json=as_json))


@cache_app.command(
    "verify",
    epilog="""\b
Examples:
  omnigemm cache verify
  omnigemm cache verify --repair --json""",
)
def cache_verify(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what fails; make folders private again.")] = False,
    as_json: Json = False,
) -> None:
    """Check the folders, every compiled kernel's digests, owner and permissions, and every measured table's rows.

    Exits with 1 when one fails.
    """
    from .cache import run_verify

    raise typer.Exit(run_verify(repair=repair, as_json=as_json))


@cache_app.command(
    "clear",
    epilog="""\b
Examples:
  omnigemm cache clear --yes
  omnigemm cache clear --tables""",
)
def cache_clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Also remove what `omnigemm tune` measured.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the compiled kernels, and nothing else unless asked to: measured tables stay without --tables."""
    from .cache import run_clear

    raise typer.Exit(run_clear(yes=yes, with_tables=tables, as_json=as_json))
