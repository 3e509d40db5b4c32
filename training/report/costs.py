"""What the report's artifacts cost in time and energy, and what their pages share with each other and with task items.

    stages_table(study)     one row a kind of stage: wall time, processor and GPU hours, energy estimate, FLOPs
    overlap_table(study)    one row an arm: copies among its pages, overlap with evaluation items

Energy is an estimate: wall time times an assumed draw. Processors: WATTS_PER_CPU for each of the machine's, as if the stage had the
machine to itself; GPUs: the board power of the model that the manifest names.
"""

from collections.abc import Mapping

from training.report.lineage import Study
from training.report.tables import Table, Value, table

WATTS_PER_CPU = 10.0  # assumed; server processors draw 3 to 15 W a hardware thread under load
# Board power in watts, from the makers' data sheets; the longest name that fits is taken.
GPU_WATTS: Mapping[str, float] = {"H200": 700, "H100 PCIe": 350, "H100": 700, "A100": 400, "L40S": 350, "A10": 150, "V100": 300, "T4": 70}


def stages_table(study: Study) -> Table:
    """Measured times, so it differs between two machines that did the same work."""
    rows: dict[str, dict[str, float | int | None]] = {}
    for artifact in study.lineage:
        manifest = artifact.manifest
        row = rows.setdefault(artifact.stage, {"artifacts": 0, "wall": 0.0, "cpu": 0.0, "gpu": 0.0, "kwh": 0.0, "flops": None})
        seconds = float(manifest["wall_time_s"])
        notes = manifest["notes"]
        device = str(notes.get("device", "cpu"))
        ranks = int(notes.get("ranks") or 1)
        on_gpu = device != "cpu" and artifact.stage in ("train", "evaluate")
        watts = (gpu_watts(device) or 0.0) * ranks if on_gpu else 0.0
        watts += WATTS_PER_CPU * int(manifest["machine"]["cpus"] or 1)
        _add(row, "artifacts", 1)
        _add(row, "wall", seconds)
        _add(row, "cpu", 0.0 if on_gpu else seconds / 3600)
        _add(row, "gpu", seconds / 3600 * ranks if on_gpu else 0.0)
        if on_gpu and gpu_watts(device) is None:
            row["kwh"] = None
        _add(row, "kwh", watts * seconds / 3.6e6)
        if "train_flops" in manifest["counts"]:
            row["flops"] = float(row["flops"] or 0.0) + float(artifact.count("train_flops"))
    return table("stages", (_row(stage, row) for stage, row in rows.items()))


def _add(row: dict[str, float | int | None], key: str, value: float | int) -> None:
    """A sum with a missing part stays missing."""
    before = row[key]
    row[key] = None if before is None else before + value


def _row(stage: str, row: Mapping[str, float | int | None]) -> dict[str, Value]:
    return {
        "stage": stage,
        "artifacts": row["artifacts"],
        "wall_time_s": row["wall"],
        "cpu_stage_hours": row["cpu"],
        "gpu_hours": row["gpu"],
        "energy_kwh_estimate": row["kwh"],
        "train_flops": row["flops"],
    }


def gpu_watts(device: str) -> float | None:
    """Board power of a GPU by its name; None for one that is not in the list."""
    fitting = [name for name in GPU_WATTS if name.lower() in device.lower()]
    return GPU_WATTS[max(fitting, key=len)] if fitting else None


def overlap_table(study: Study) -> Table:
    """One row an arm with an overlap stage. Shares are of its kept pages and of the items that could be checked."""
    records: list[dict[str, Value]] = []
    for name in sorted(study.overlaps):
        overlap = study.overlaps[name]
        pages, items = int(overlap.count("pages")), int(overlap.count("items"))
        checked = items - int(overlap.count("short_items"))
        copies = int(overlap.count("exact_duplicates")) + int(overlap.count("near_duplicates"))
        records.append(
            {
                "arm": name,
                "pages": pages,
                "exact_duplicates": overlap.count("exact_duplicates"),
                "near_duplicates": overlap.count("near_duplicates"),
                "copies_share": copies / pages if pages else None,
                "pages_with_task_items": overlap.count("overlapping_pages"),
                "contaminated_pages_share": int(overlap.count("overlapping_pages")) / pages if pages else None,
                "items": items,
                "items_too_short_to_check": overlap.count("short_items"),
                "overlapping_items": overlap.count("overlapping_items"),
                "overlapping_items_share": int(overlap.count("overlapping_items")) / checked if checked else None,
                "overlap": overlap.fingerprint,
            }
        )
    return table("overlap", records)
