"""Puts the catalogue (every paper.yml and the recorded evidence) into the wheel as package data, and maps kernels/."""
from pathlib import Path
from shutil import copyfile

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CATALOGUE = ("paper.yml", "claims.small.json", "area.yml")


class BuildWithCatalogue(build_py):
    def run(self):
        super().run()
        if self.editable_mode:  # an editable install reads nbs/ in the checkout
            return
        root = Path(__file__).parent
        for name in CATALOGUE:
            for source in sorted((root / "nbs").rglob(name)):
                target = Path(self.build_lib) / "neurips26_lit" / "_catalogue" / source.relative_to(root / "nbs")
                self.mkpath(str(target.parent))
                copyfile(source, target)
        for source in sorted((root / "kernels").glob("*.json")):
            copyfile(source, Path(self.build_lib) / "neurips26_lit" / "kernels" / source.name)


setup(
    packages=find_packages(include=["neurips26_lit", "neurips26_lit.*"], exclude=["neurips26_lit._catalogue*"]) + ["neurips26_lit.kernels"],
    cmdclass={"build_py": BuildWithCatalogue},
)
