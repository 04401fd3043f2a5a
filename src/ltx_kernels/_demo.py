"""`python -m ltx_kernels demo`: one block of LTX-2 through this package's kernels, held against full precision."""

from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ltx_kernels import _block, _compare
from ltx_kernels._compare import FORMATS, Result

WIDTH = 80  # the table fits, so a wider one would only be sparser


def main(tokens: int | None, save: Path | None) -> int:
    """Runs the block, prints what came of it and draws it if asked. 1 if an error exceeds its limit, else 0."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _compare.reference_dtype(device)
    console = Console(width=WIDTH, highlight=False)
    if tokens is None:
        tokens = _compare.default_tokens(device)
    console.print(_heading(tokens, device, dtype), end="\n\n")
    results = _run(tokens, device, dtype)
    console.print(_step_table(results), _step_notes(dtype), _format_table(results), _format_notes(dtype))
    if save:
        save_figure(results, tokens, device, save)
        console.print(f"Times and errors are drawn in {save}.", soft_wrap=True)
    found = failures(results)
    for line in found:
        console.print(line, style="red", soft_wrap=True)
    if not found:
        console.print("All errors are within their limits.", style="green")
    return 1 if found else 0


def failures(results: dict[str, Result]) -> list[str]:
    """A line for each error above its limit, or NaN."""
    found = []
    for name, result in results.items():
        checks = [(row.title, row.error, row.limit) for row in result.rows]
        checks.append(("the weights", result.weight_error, result.weight_limit))
        checks.append(("the block", result.block_error, result.block_limit))
        for what, error, limit in checks:
            if not error <= limit:
                found.append(f"demo: error of {what}, {name}, must be at most {_percent(limit)}, got {_percent(error)}")
    return found


def _run(tokens: int, device: torch.device, dtype: torch.dtype) -> dict[str, Result]:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description:15}"),
        BarColumn(bar_width=40),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar, torch.no_grad():
        task = bar.add_task("", total=_compare.num_pieces())
        return _compare.run(tokens, device, dtype, lambda what: bar.update(task, advance=1, description=what))


def _heading(tokens: int, device: torch.device, dtype: torch.dtype) -> str:
    grid = "×".join(str(size) for size in _block.smallest_grid(tokens))
    return (
        "[bold]One video block of LTX-2: self-attention and feed-forward[/bold]\n"
        f"hidden {_block.HIDDEN}, {_block.HEADS} heads of {_block.HIDDEN // _block.HEADS}, FFN {_block.FFN}; "
        f"{tokens:,} tokens of a {grid} latent grid\n"
        f"on {_where(device)}; reference in {_name(dtype)}{', TF32 off' if dtype == torch.float32 else ''}; "
        f"needs {_compare.bytes_needed(tokens) / 1e9:.1f} GB"
    )


def _step_table(results: dict[str, Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("Step", no_wrap=True)
    table.add_column("Backend", no_wrap=True)
    table.add_column("Output", justify="right", no_wrap=True)
    for name in FORMATS:
        table.add_column(f"{name}\ntime", justify="right", no_wrap=True)
        table.add_column("\nerror", justify="right", no_wrap=True)
    table.add_column("\nlimit", justify="right", no_wrap=True)
    for rows in zip(*(result.rows for result in results.values()), strict=True):
        cells = [rows[0].title, rows[0].backend, rows[0].size]
        for row in rows:
            cells += [_duration(row.seconds), "" if row.is_copy else _judged(row.error, row.limit)]
        cells.append("" if rows[0].is_copy else _percent(max(row.limit for row in rows)))
        table.add_row(*cells, style="dim" if rows[0].is_copy else None)
    table.add_section()
    totals = [_duration(sum(row.seconds for row in result.rows)) for result in results.values()]
    table.add_row("All steps", "", "", *(cell for total in totals for cell in (total, "")), "")
    return table


def _step_notes(dtype: torch.dtype) -> Padding:
    return _notes(
        f"Error: |output - exact| / |exact| of this step alone; exact is the same step in {_name(dtype)} on the same "
        "inputs. Limit: half a step of the output's number format everywhere, plus what a product may lose in tensor "
        "cores and attention by bf16 weights; evenly spread rounding alone comes to 58% of it."
    )


def _format_table(results: dict[str, Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in ("Weights", "Memory", "of bf16", "Weight error", "limit", "Block error", "limit"):
        table.add_column(name, justify="left" if name == "Weights" else "right", no_wrap=True)
    full = next(iter(results.values())).bf16_bytes
    table.add_row("bf16", _megabytes(full), "100%", "", "", "", "")
    for name, result in results.items():
        table.add_row(
            name,
            _megabytes(result.weight_bytes),
            f"{100 * result.weight_bytes / full:.0f}%",
            _judged(result.weight_error, result.weight_limit),
            _percent(result.weight_limit),
            _judged(result.block_error, result.block_limit),
            _percent(result.block_limit),
        )
    return table


def _format_notes(dtype: torch.dtype) -> Padding:
    return _notes(
        f"Block error: all steps in a row, against the block in {_name(dtype)} with the bf16 weights. Its limit: the "
        "limits of steps and weights, added as squares. Activations are FP8 in both formats."
    )


def save_figure(results: dict[str, Result], tokens: int, device: torch.device, path: Path) -> None:
    """Times as bars and errors as points before their limits, a line for each step."""
    from matplotlib.figure import Figure  # a run that saves nothing does without it

    colors = dict(zip(results, ("#1f6f8b", "#e07a3f"), strict=True))
    rows = next(iter(results.values())).rows
    lines = range(len(rows))
    figure = Figure(figsize=(11, 0.42 * len(rows) + 2.3), layout="constrained")
    figure.suptitle(
        f"One video block of LTX-2, {tokens:,} tokens, on {_where(device)}\n"
        + ", ".join(f"{name} weights: {_percent(r.block_error)} off full precision" for name, r in results.items()),
        fontsize=12,
    )
    times, errors = figure.subplots(1, 2, sharey=True)
    thickness = 0.8 / len(results)
    for i, (name, result) in enumerate(results.items()):
        offsets = [line + (i - (len(results) - 1) / 2) * thickness for line in lines]
        milliseconds = [1e3 * row.seconds for row in result.rows]
        bars = times.barh(offsets, milliseconds, thickness * 0.9, color=colors[name], label=name)
        times.bar_label(bars, [_duration(row.seconds) for row in result.rows], padding=3, fontsize=7.5, color="#444444")
        steps = [(offset, row) for offset, row in zip(offsets, result.rows, strict=True) if not row.is_copy]
        at = [offset for offset, _ in steps]
        errors.barh(at, [100 * row.limit for _, row in steps], thickness * 0.9, color="#e8e8e8", zorder=1)
        errors.plot([100 * row.error for _, row in steps], at, "o", color=colors[name], label=name, zorder=2)
    times.set_yticks(lines, [f"{row.title.strip()} ({row.backend})" for row in rows])
    times.set(xscale="log", xlabel="time", ylim=(len(rows) - 0.5, -0.5))
    times.margins(x=0.2)  # room for the labels of the longest bars
    times.xaxis.set_major_formatter(lambda milliseconds, _: f"{milliseconds:g} ms")
    errors.set(xscale="log", xlabel="relative error of the step (grey: up to its limit)", xlim=(0.05, 10))
    errors.set_xticks([0.1, 1, 10], ["0.1%", "1%", "10%"])
    for axes in (times, errors):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
    errors.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(results), frameon=False)
    figure.savefig(path, dpi=150)


def _where(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _notes(text: str) -> Padding:
    return Padding(f"[dim]{text}[/dim]", (1, 0))


def _judged(error: float, limit: float) -> str:
    return f"[{'green' if error <= limit else 'bold red'}]{_percent(error)}[/]"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    unit, value = next(
        ((unit, seconds * per_second) for unit, per_second in (("s", 1), ("ms", 1e3)) if seconds * per_second >= 1),
        ("us", seconds * 1e6),
    )
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
