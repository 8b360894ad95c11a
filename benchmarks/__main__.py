"""`python -m benchmarks [--json PATH]`: measures, prints a table, and writes the rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import codec

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--json", type=Path, help="write the rows there")
options = parser.parse_args()

console, found = Console(), []
for row in codec.rows():
    found.append(row)
    console.print(f"{row['name']}: {row['value']:.2f} {row['unit']}", highlight=False)
table = Table("what", "value", "unit", "beside a copy", title="one core")
for row in found:
    table.add_row(str(row["name"]), f"{row['value']:.2f}", str(row["unit"]), f"{row['beside']:.2f}")
console.print(table)
if options.json is not None:
    options.json.write_text(json.dumps({"rows": found}, indent=2) + "\n")
