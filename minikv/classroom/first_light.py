"""`python -m minikv.classroom.first_light` draws the figure of README.md from a real run."""

from pathlib import Path

from minikv.experiments.first_light import first_light_run
from minikv.viz.first_light import first_light

PATH = Path(__file__).resolve().parents[2] / "notebooks" / "img" / "first_light.png"

if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    first_light(first_light_run())[0].save(PATH, dpi=200)
    print(PATH)
