"""The command that writes code for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from .app import Json, app
from .terminal import print_json, print_table


@app.command("export-kernel")
def export_kernel(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Write the rotation as a layer for Hugging Face's kernels.

    The files import only torch and Triton. transformers loads them instead of its own function.
    """
    from ..integrations import hub_kernel

    files = [path.as_posix() for path in hub_kernel.export(folder)]
    if as_json:
        print_json({"folder": str(folder), "layers": hub_kernel.LAYERS, "files": files})
        return
    print_table(f"{folder}: written for Hugging Face's kernels", [(file,) for file in files], ("",))
    load = f'LocalLayerRepository(repo_path=Path("{folder}"), layer_name="{hub_kernel.LAYERS[0]}")'
    typer.echo(f"\nUse it: {load}")
    typer.echo(f"Other layers: {', '.join(hub_kernel.LAYERS[1:])}")
