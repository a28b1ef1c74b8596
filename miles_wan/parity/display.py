"""A parity report for people. In: the report. Out: tables and sentences on a console."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from miles_wan.parity.report import UNKNOWN, ParityReport


def show(report: ParityReport, console: Console) -> None:
    """Print steps, checks, clip range and noise floor, causes, verdict."""
    console.print(
        f"{report.engine} engine against the trainer: {report.samples} samples of {report.records} records; {report.precision}",
        soft_wrap=True,
    )
    if report.refused is not None:
        console.print(f"the engine refused: {report.refused}", markup=False)
    if report.rows:
        console.print(_steps(report))
        console.print(_checks(report))
        _show_floor(report, console)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    for number, cause in enumerate(report.causes):
        name = "cause not known" if cause.name == UNKNOWN else cause.name
        console.print(f"{'likely cause' if number == 0 else 'also'}: {name}", style="bold red", markup=False)
        console.print(f"  {cause.evidence}", markup=False)
    verdict = "parity holds" if report.holds else "parity FAILS"
    console.print(verdict, style="bold green" if report.holds else "bold red")


def _steps(report: ParityReport) -> Table:
    table = _table("engine against trainer by step, over the sampled elements")
    experts = len({row.expert for row in report.rows}) > 1
    for name in ("step", "sigma", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("output", "mean", "log-prob"):
        table.add_column(f"{name}\nmean", justify="right", no_wrap=True)
        table.add_column("\nmax", justify="right", no_wrap=True)
    for row in report.rows:
        gaps = (
            row.model_output_mean,
            row.model_output_max,
            row.mean_mean,
            row.mean_max,
            row.log_prob_mean,
            row.log_prob_max,
        )
        step = f"{row.step} {row.expert}" if experts else str(row.step)
        table.add_row(step, f"{row.sigma:.4f}", str(row.pairs), *(f"{gap:.1e}" for gap in gaps))
    return table


def _checks(report: ParityReport) -> Table:
    table = _table("checks, in the order of the computation")
    table.add_column("quantity")
    for name in ("largest", "bound"):
        table.add_column(name, justify="right")
    table.add_column("unit")
    table.add_column("")
    for check in report.checks:
        holds = "[green]ok" if check.holds else "[bold red]fails"
        table.add_row(check.name, f"{check.value:.1e}", f"{check.bound:.0e}", check.unit, holds)
    return table


def _show_floor(report: ParityReport, console: Console) -> None:
    floor = report.kl_floor if "kl_threshold" in report.clip else report.noise_floor
    if floor is None:
        return
    bounds = "".join(f"{name} {value:g}; " for name, value in report.clip.items())
    share = f" ({100 * floor / min(report.clip.values()):.2g} % of it)" if report.clip else ""
    console.print(f"{bounds}noise floor {floor:.1e}{share}", soft_wrap=True)


def _table(title: str) -> Table:
    """Narrow enough for 80 columns."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
