"""Plans with a layer on one node only, in the parts that `card_columns` asks for one by one."""

from dataclasses import dataclass, replace

WIDE = 8  # devices that whole pipelines may take or not, that are as much as all the bytes that home may sum
NARROW = 1 / 64  # of these bytes, that are not told apart any more


@dataclass(frozen=True, slots=True)
class HomePart:
    """Plans that are asked for together; without a home, all.

    whole: those with home at the end of some pipeline and at the beginning of some. Of these least, most:
    bytes that home sums with others, as a share of those of the model; first, last: devices of home in
    pipelines that are there with all layers. single, several: of plans of one pipeline, or of two and more;
    neither of them: of any number.
    """

    whole: bool = False
    least: float = 0.0
    most: float = 0.0
    first: int = 0
    last: int = 0
    single: bool = False
    several: bool = False

    def most_pipelines(self, width: int) -> int:
        """Return the most pipelines that are not whole on a home of so many devices: each has one there."""
        return 1 if self.single else width - self.first

    def parts(self, *, sums: bool) -> tuple["HomePart", ...]:
        """Return the same plans in two parts; none where nothing is left to tell apart. sums: count."""
        if not self.whole:
            told = self.single or self.several
            return () if told else (replace(self, single=True), replace(self, several=True))
        if self.last > self.first and (not sums or self.last - self.first >= WIDE * (self.most - self.least)):
            middle = (self.first + self.last) // 2
            return replace(self, last=middle), replace(self, first=middle + 1)
        if not sums or self.most - self.least <= NARROW:
            return ()
        between = (self.least + self.most) / 2
        return replace(self, most=between), replace(self, least=between)


def first_parts(width: int, *, whole: bool, ends: float = 0.0) -> list[HomePart]:
    """Return all plans whose home has so many devices. whole: and where some pipeline ends, some begins.

    ends: share of the model's bytes in the first and the last layer, both of which home sums with others
    where no pipeline is whole there: one has its first layer elsewhere, and one its last.
    """
    if not whole:
        return [HomePart()]
    mixed = HomePart(whole=True, least=ends, most=1.0, several=True)
    return [mixed, HomePart(whole=True, most=1.0, first=1, last=width - 1, several=True)]
