"""Build the library of CUTLASS's int8 products that our own are measured beside.

    pip download --no-deps nvidia-cutlass && unzip -q nvidia_cutlass-*.whl -d cutlass
    python benchmarks/peers/build.py --cutlass cutlass/cutlass_library/source/include --out libcutlass_int8.so

It needs the headers of CUTLASS (from its wheel, as above, or from its repository) and nvcc, but no GPU; a config takes
a minute of one core. The CUDA runtime is linked in, so that the library loads beside whichever one PyTorch brings.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).with_name("cutlass_int8.cu")
# Only machine code: no other architecture could run what PTX for sm_90a becomes.
ARCHITECTURE = ("-gencode", "arch=compute_90a,code=sm_90a")
COMPILE = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden")
# Neither symbols of the runtime nor debug information leave the library.
LINK = ("-shared", "-cudart", "static", "-Xlinker", "--exclude-libs=ALL", "-Xlinker", "--strip-all")


def configs(source: str) -> list[int]:
    """The indices of the configs that the source lists."""
    return [int(index) for index in re.findall(r"^ *X\((\d+),", source, re.MULTILINE)]


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")


def build(nvcc: str, include: Path, out: Path, jobs: int) -> None:
    if not (include / "cutlass" / "cutlass.h").is_file():
        raise RuntimeError(f"--cutlass {include}: expected the folder that holds cutlass/cutlass.h")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def compiled(*define: str) -> str:
            target = str(Path(folder, f"{''.join(define)}.o"))
            run([nvcc, *ARCHITECTURE, *COMPILE, f"-I{include}", *define, "-c", str(SOURCE), "-o", target])
            print("compiled", *(define or ["interface"]), flush=True)
            return target

        work = [pool.submit(compiled), *(pool.submit(compiled, f"-DCONFIG={i}") for i in configs(SOURCE.read_text()))]
        try:
            objects = [each.result() for each in work]
        except RuntimeError:
            pool.shutdown(cancel_futures=True)  # a minute each: report the first failure at once
            raise
        run([nvcc, *ARCHITECTURE, *LINK, *objects, "-o", str(out)])
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cutlass", type=Path, required=True, help="the folder that holds cutlass/ and cute/")
    parser.add_argument("--out", type=Path, required=True, help="the library to write")
    parser.add_argument("--nvcc", default="nvcc", help="nvcc 12.3 or later")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    args = parser.parse_args()
    try:
        build(args.nvcc, args.cutlass, args.out, args.jobs)
    except (RuntimeError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
