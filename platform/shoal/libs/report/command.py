"""`shoal report`: write the page of a run."""

from __future__ import annotations

import click

from shoal.extend.runs import load
from shoal.libs.report.page import write_page


@click.command()
@click.argument("run", default="latest")
@click.option("--open-path", is_flag=True, help="Print the path of the page and nothing else, to hand to a browser.")
def report(run: str, open_path: bool) -> None:
    """Write the one-page HTML report of a RUN (the newest when left out), with its learning curve as a picture.

    \b
    Examples:
      shoal report
      shoal report 20261120-064501-3f2a
      xdg-open "$(shoal report latest --open-path)"
    """
    record = load(run)
    path = write_page(record)
    if open_path:
        click.echo(path)
        return
    click.echo(f"The report of {record.id} ({record.status.value}): {path}")
    picture = path.with_name("learning_curve.png")
    if picture.exists():
        click.echo(f"Its learning curve: {picture}")
