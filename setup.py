"""The settings are in pyproject.toml. This adds what it cannot say: links of the README that work on a package index.

An index shows the README without the repository, where links to files lead nowhere. With a `Source` in
`[project.urls]` they become links to the files of this version's tag, without one only their text stays. The README
itself keeps its links, which work in the repository.
"""

import re

FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
#: a link's text may have a picture in it
TEXT = r"(?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*"
#: what is a link to a file: no scheme, and no place in the README itself
TO_FILE = r"\((?![\w+.-]+:|#)([^\s)]+)([^)]*)\)"
PICTURE = re.compile(r"!\[([^\]]*)\]" + TO_FILE)
LINK = re.compile(rf"(?<!!)\[({TEXT})\]" + TO_FILE)
#: one for dark pages and one for others, in HTML
EITHER = re.compile(r"<picture>.*?</picture>", re.DOTALL)
FILE = re.compile(r'(src|srcset)="(?![\w+.-]+:)([^"]+)"')
ALT = re.compile(r'alt="([^"]*)"')


def for_an_index(text: str, source: str | None, version: str) -> str:
    """The text of a README whose links to files of the repository are absolute, or no links if `source` is None.

    `source` is the address of the repository, with files at `/blob/` and `/raw/` as on GitHub and GitLab.
    """

    def absolute(pattern: re.Pattern[str], kind: str, part: str) -> str:
        if source is None:
            return pattern.sub(r"\1", part)
        place = f"{source.rstrip('/')}/{kind}/v{version}"
        mark = "!" if pattern is PICTURE else ""
        return pattern.sub(lambda found: f"{mark}[{found[1]}]({place}/{found[2].removeprefix('./')}{found[3]})", part)

    def either(found: re.Match[str]) -> str:
        if source is None:
            return "".join(ALT.findall(found[0]))
        return FILE.sub(rf'\1="{source.rstrip("/")}/raw/v{version}/\2"', found[0])

    parts = FENCED.split(text)
    parts[::2] = [EITHER.sub(either, absolute(LINK, "blob", absolute(PICTURE, "raw", part))) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":  # a test imports the function, where there need not be setuptools
    import setuptools

    class Distribution(setuptools.Distribution):
        """One whose description is the README for an index."""

        def parse_config_files(self, *args: object, **kwargs: object) -> None:
            super().parse_config_files(*args, **kwargs)
            about = self.metadata
            source = (about.project_urls or {}).get("Source")
            about.long_description = for_an_index(about.long_description, source, about.version)

    setuptools.setup(distclass=Distribution)
