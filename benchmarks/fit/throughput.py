"""Fit kvcalc/throughput/constants.json to published measurements, and measure the error on rows left out of the fit.

    python benchmarks/fit/throughput.py --data FOLDER [--dry-run]

The servers (vLLM, SGLang, TensorRT-LLM) and the compiled loop that `logical` represents are fitted together, and so are
llama.cpp and MLX. Engines, kinds of devices and older releases deviate from the common constants, as far as their rows
say so. What single kernels say is taken from kernel tables (benchmarks/fit/kernels/tables.py) and not fitted, or is the
prior. No constant belongs to a single model or row.

A time under load is that of the short form, corrected by the simulation of the row in each round (`simulated`).

For the error, a whole model family (all its sources), a device or a release is left out. The range in an answer is the
10th to 90th percentile of measured / predicted with the family left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks.fit.document import describe
from benchmarks.fit.fitted import family_of, fitted_to, left_out
from benchmarks.fit.rows import data_folder, read_rows

TARGET = Path(__file__).resolve().parents[2] / "kvcalc" / "throughput" / "constants.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--dry-run", action="store_true", help="only fit and print; write nothing, leave nothing out")
    options = parser.parse_args()
    rows = read_rows(data_folder(options.data))
    fitted = fitted_to(rows)
    here = fitted.predict(rows)
    for key, model in fitted.models.items():
        print(key, model.described(fitted.theta[key]))
    for source in dict.fromkeys(row.source for row in rows):
        chosen = [i for i, row in enumerate(rows) if row.source == source]
        errors = np.array([abs(here[i][0] / rows[i].seconds - 1) for i in chosen])
        print(source, len(errors), f"mean {errors.mean():.3f} median {np.median(errors):.3f}")
    if options.dry_run:
        return
    document = describe(rows, fitted, here, left_out(rows, family_of, fitted))
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
