"""Seeded English-like text: short stories whose later sentences depend on earlier ones.

In the fixed kinds of story much can be predicted, but only by tracking state: the owner of an object, the place of each
person, numbers that add up, pronouns, singular and plural, a moral that follows from an action. Facts of the world (the
country of a town, the food of an animal) hold in every story. Scenes are looser: actions, objects and adverbs follow
habits, thousands of seeded conditional frequencies, as in natural text. They fill a model's layers, so that its
perplexity rises when these are compressed.
"""

# ruff: noqa: SIM905 - as lists, the words would take a page

from __future__ import annotations

from collections.abc import Sequence
from random import Random

WOMEN = "Anna Clara Edith Greta Ida Lena Mary Nora Paula Rosa Sara Tilda".split()
MEN = "Adam Boris Carl David Emil Frank Hugo Jonas Leo Martin Oscar Peter".split()
SURNAMES = "Abel Brook Crane Dahl Egger Fisk Gray Holm Iversen Jonson Keller Lund Moss Nagel Olsen Price".split()
TOWNS = (
    "Arvik Norland herring, Belmora Sudria olives, Castelo Sudria lemons, Dunholm Westmark wool, Elbing Ostria amber, "
    "Farrow Westmark coal, Grimsund Norland timber, Havnes Norland salt, Istra Sudria wine, Jarosk Ostria honey, "
    "Kirkby Westmark cheese, Lodomir Ostria rye"
).split(", ")
ANIMALS = (
    "cat mouse fish, dog stick bones, duck frog bread, goat rope grass, hen worm corn, horse cart oats, "
    "rabbit carrot leaves"
).split(", ")
PLACES = (
    "barn shelf, cellar barrel, church altar, forest stump, garden bench, harbour boat, kitchen table, market stall, "
    "mill sack, school desk"
).split(", ")
TRADES = (
    "baker bread, brewer beer, cobbler shoes, fisher nets, joiner chairs, miller flour, potter jars, smith nails, "
    "tailor coats, weaver cloth"
).split(", ")
MOODS = (
    ("angry", "shouted", "hid", "What is hidden in anger is found in shame."),
    ("brave", "smiled", "saved", "Who dares a little wins a little."),
    ("glad", "laughed", "shared", "What is shared is not lost."),
    ("sad", "cried", "lost", "What is lost can be found again."),
    ("tired", "yawned", "forgot", "Sleep first, and work after."),
)
NUMBERS = "no one two three four five six seven eight nine ten eleven twelve".split()
TIMES = "morning afternoon evening night".split()
COLOURS = "red blue green yellow white black brown grey".split()
THINGS = (
    "apple ball basket bell book box brush button candle coin cup drum egg flute hat key lamp letter pear ring"
).split()
VERBS = (
    "bought broke brought carried caught cleaned counted cut dropped drew found held kept kicked lifted loved made "
    "mended moved needed opened painted pulled pushed showed sold stole threw took turned wanted washed"
).split()
ADJECTIVES = (
    "big bright broken cheap clean cold dark dirty dry empty fine flat heavy large light little long new old plain "
    "pretty round sharp small soft strange strong thin warm wet wide worn"
).split()
ADVERBS = (
    "at once, by chance, carefully, every day, gladly, in secret, often, quickly, quietly, slowly, soon, too late, "
    "twice, with care, without a word, with both hands"
).split(", ")
ENDINGS = "laughed, cried, went home, sat down, slept well, said nothing, ran away, sang, fell asleep".split(", ")


def story_text(num_bytes: int, seed: int) -> str:
    """Return whole stories, one to a line, of at least `num_bytes` bytes in all: the same for the same seed."""
    rng, lines, size = Random(seed), [], 0
    while size < num_bytes:
        story = _scene if rng.random() < 0.6 else rng.choice((_errand, _counting, _animal, _journey, _mood, _portrait))
        lines.append(story(rng) + "\n")
        size += len(lines[-1].encode())
    return "".join(lines)


def _errand(rng: Random) -> str:
    owner, she, friend, he = _two_people(rng)
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    (here, table), (there, shelf) = (row.split() for row in rng.sample(PLACES, 2))
    beginning = (
        f"{owner} had {_a(colour)} {thing}. In the {rng.choice(TIMES)} {she} put it on the {table} in the {here}. "
        f"Then {friend} came to the {here}, saw the {colour} {thing} and took it to the {there}. "
    )
    endings = (
        f'{owner} went to the {here}, but the {table} was empty. "Where is my {thing}?" asked {owner}. '
        f'"It is on the {shelf} in the {there}," said {friend}.',
        f"There {he} laid the {thing} on the {shelf}. Now the {colour} {thing} of {owner} is in the {there}.",
    )
    return beginning + endings[rng.random() >= 0.5]


def _counting(rng: Random) -> str:
    giver, she, friend, _ = _two_people(rng)
    thing, had = rng.choice(THINGS), rng.randint(2, 9)
    given = rng.randint(1, had - 1)
    left = had - given
    found = rng.randint(1, 12 - left)
    return (
        f"{giver} had {_many(had, thing)}. {she.capitalize()} gave {_many(given, thing)} to {friend}, and there "
        f"{'was' if given == 1 else 'were'} {NUMBERS[given]} in the {rng.choice(('bag', 'pocket'))} of {friend}. So "
        f"{giver} had {_many(left, thing)} left. Later {she} found {_many(found, thing)} in the "
        f"{rng.choice(PLACES).split()[0]}. {NUMBERS[left].capitalize()} and {NUMBERS[found]} make "
        f"{NUMBERS[left + found]}, so now {she} has {_many(left + found, thing)}."
    )


def _animal(rng: Random) -> str:
    owner, _, her = _person(rng)
    animal, toy, food = rng.choice(ANIMALS).split()
    colour, (place, table) = rng.choice(COLOURS), rng.choice(PLACES).split()
    return (
        f"{owner} and {her} {colour} {animal} live near the {place}. Every {rng.choice(TIMES)} the {animal} runs after "
        f"{_a(toy)} and eats {food}. When the {toy} is gone, the {colour} {animal} waits by the {table} in the "
        f"{place}, and {owner} brings {food}, because {_a(animal)} likes {food} best."
    )


def _journey(rng: Random) -> str:
    traveller, she, _ = _person(rng)
    (home, land, sold), (away, abroad, bought) = (row.split() for row in rng.sample(TOWNS, 2))
    border = "did not cross a border" if land == abroad else f"crossed the border of {abroad}"
    return (
        f"{traveller} comes from {home} in {land}, where people sell {sold}. Last year {she} went to {away} and "
        f"{border}. The people of {away} sell {bought}, so {traveller} bought {bought} there and sold {sold}. Then "
        f"{she} went home to {home} in {land} with {bought} from {abroad}."
    )


def _mood(rng: Random) -> str:
    hero, she, friend, he = _two_people(rng)
    mood, sound, deed, moral = rng.choice(MOODS)
    thing, (place, table) = rng.choice(THINGS), rng.choice(PLACES).split()
    return (
        f"{hero} was {mood} and {sound} in the {place}. {she.capitalize()} {deed} the {thing} of {friend}. "
        f'"Why are you {mood}, {hero}?" asked {friend}, and {he} sat down by the {table}. '
        f'"I {sound} because I am {mood}," said {hero}. {moral}'
    )


def _portrait(rng: Random) -> str:
    """A person with a surname, whose home, trade, animal and colour are the same in every story."""
    name, she, her = _person(rng)
    name = f"{name} {rng.choice(SURNAMES)}"
    fixed = Random(name)
    (town, land, _), (trade, goods) = fixed.choice(TOWNS).split(), fixed.choice(TRADES).split()
    (animal, _, food), colour, thing = fixed.choice(ANIMALS).split(), fixed.choice(COLOURS), fixed.choice(THINGS)
    return (
        f"{name} is a {trade} in {town}, {land}, and makes {goods}. {she.capitalize()} owns a {colour} {animal} that "
        f"eats {food}. On {her} door is {_a(thing)}. If you want {goods} in {town}, ask for {name}, and look for the "
        f"{thing} on the door."
    )


def _scene(rng: Random) -> str:
    """Some sentences in one place; each word is drawn by habit from the words around it."""
    hero, she, friend, _ = _two_people(rng)
    place = _habit(rng, [row.split()[0] for row in PLACES], hero)
    text, verb, thing = f"In the {place}:", "", ""
    for position in range(rng.randint(2, 5)):
        who = hero if position == 0 else rng.choice((she, she, friend)).capitalize()
        verb = _habit(rng, VERBS, hero if who != friend else friend, place)
        # Half of the time, repeat the thing of the sentence before.
        thing = thing if thing and rng.random() < 0.5 else _habit(rng, THINGS, verb, place)
        adjective, adverb = _habit(rng, ADJECTIVES, thing, place), _habit(rng, ADVERBS, verb, thing)
        text += f" {who} {verb} the {adjective} {thing} {adverb}."
    return f"{text} Then {hero} {_habit(rng, ENDINGS, verb, thing)}."


def _habit(rng: Random, options: Sequence[str], *conditions: str) -> str:
    """Draw one of `options`. `conditions` decide their order; the frequency is proportional to 1 / rank^1.5."""
    order = list(options)
    Random("|".join(conditions)).shuffle(order)
    return rng.choices(order, [(rank + 1) ** -1.5 for rank in range(len(order))])[0]


def _person(rng: Random) -> tuple[str, str, str]:
    """Draw a name, with its pronouns."""
    she, her, names = rng.choice((("she", "her", WOMEN), ("he", "his", MEN)))
    return rng.choice(names), she, her


def _two_people(rng: Random) -> tuple[str, str, str, str]:
    """Draw two names, each with its pronoun."""
    (hero, she, _), (friend, he, _) = _person(rng), _person(rng)
    while friend == hero:
        friend, he, _ = _person(rng)
    return hero, she, friend, he


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _many(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("x", "sh")) else "s")
    return f"{NUMBERS[count]} {noun if count == 1 else plural}"
