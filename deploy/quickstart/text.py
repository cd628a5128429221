"""Seeded English-like text: short stories whose later sentences depend on earlier ones.

In the fixed kinds of story much can be predicted, but only by tracking state: the owner of an object, the place of each
person, numbers that add up, pronouns, singular and plural, a moral that follows from an action. Facts of the world (the
country of a town, the food of an animal) hold in every story. Scenes are looser: actions, objects and adverbs follow
habits, thousands of seeded conditional frequencies, as in natural text. They fill a model's layers, so that its
perplexity rises when these are compressed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

PEOPLE = {
    "she": ["Anna", "Clara", "Edith", "Greta", "Ida", "Lena", "Mary", "Nora", "Paula", "Rosa", "Sara", "Tilda"],
    "he": ["Adam", "Boris", "Carl", "David", "Emil", "Frank", "Hugo", "Jonas", "Leo", "Martin", "Oscar", "Peter"],
}
POSSESSIVE = {"she": "her", "he": "his"}
TOWNS = {
    "Arvik": ("Norland", "herring"), "Belmora": ("Sudria", "olives"), "Castelo": ("Sudria", "lemons"),
    "Dunholm": ("Westmark", "wool"), "Elbing": ("Ostria", "amber"), "Farrow": ("Westmark", "coal"),
    "Grimsund": ("Norland", "timber"), "Havnes": ("Norland", "salt"), "Istra": ("Sudria", "wine"),
    "Jarosk": ("Ostria", "honey"), "Kirkby": ("Westmark", "cheese"), "Lodomir": ("Ostria", "rye"),
}  # fmt: skip
ANIMALS = {
    "cat": ("mouse", "fish"), "dog": ("stick", "bones"), "horse": ("cart", "oats"), "goat": ("rope", "grass"),
    "hen": ("worm", "corn"), "rabbit": ("carrot", "leaves"), "duck": ("frog", "bread"),
}  # fmt: skip
THINGS = [
    "apple", "ball", "basket", "bell", "book", "box", "brush", "button", "candle", "coin",
    "cup", "drum", "egg", "flute", "hat", "key", "lamp", "letter", "pear", "ring",
]  # fmt: skip
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "grey"]
PLACES = {
    "kitchen": "table", "garden": "bench", "barn": "shelf", "market": "stall", "school": "desk",
    "church": "altar", "harbour": "boat", "mill": "sack", "forest": "stump", "cellar": "barrel",
}  # fmt: skip
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
MOODS = {
    "glad": ("laughed", "shared"), "angry": ("shouted", "hid"), "tired": ("yawned", "forgot"),
    "brave": ("smiled", "saved"), "sad": ("cried", "lost"),
}  # fmt: skip
MORALS = {
    "shared": "What is shared is not lost.",
    "hid": "What is hidden in anger is found in shame.",
    "forgot": "Sleep first, and work after.",
    "saved": "Who dares a little wins a little.",
    "lost": "What is lost can be found again.",
}
SURNAMES = [
    "Abel", "Brook", "Crane", "Dahl", "Egger", "Fisk", "Gray", "Holm", "Iversen", "Jonson", "Keller", "Lund", "Moss",
    "Nagel", "Olsen", "Price",
]  # fmt: skip
TRADES = {
    "baker": "bread", "smith": "nails", "tailor": "coats", "miller": "flour", "potter": "jars", "joiner": "chairs",
    "weaver": "cloth", "brewer": "beer", "cobbler": "shoes", "fisher": "nets",
}  # fmt: skip
VERBS = [
    "bought", "broke", "brought", "carried", "caught", "cleaned", "counted", "cut", "dropped", "drew", "found", "held",
    "kept", "kicked", "lifted", "loved", "made", "mended", "moved", "needed", "opened", "painted", "pulled", "pushed",
    "showed", "sold", "stole", "threw", "took", "turned", "wanted", "washed",
]  # fmt: skip
ADJECTIVES = [
    "big", "bright", "broken", "cheap", "clean", "cold", "dark", "dirty", "dry", "empty", "fine", "flat", "heavy",
    "large", "light", "little", "long", "new", "old", "plain", "pretty", "round", "sharp", "small", "soft", "strange",
    "strong", "thin", "warm", "wet", "wide", "worn",
]  # fmt: skip
ADVERBS = [
    "at once", "by chance", "carefully", "every day", "gladly", "in secret", "often", "quickly", "quietly", "slowly",
    "soon", "too late", "twice", "with care", "without a word", "with both hands",
]  # fmt: skip
ENDINGS = ["laughed", "cried", "went home", "sat down", "slept well", "said nothing", "ran away", "sang", "fell asleep"]
TIMES = ["morning", "afternoon", "evening", "night"]


def stories(seed: int) -> Iterator[str]:
    """Yield endless stories, one paragraph each, the same for the same seed."""
    rng = random.Random(seed)
    kinds = (_errand, _counting, _animal, _journey, _mood, _portrait)
    while True:
        yield _scene(rng) if rng.random() < 0.6 else rng.choice(kinds)(rng)


def story_text(num_bytes: int, seed: int) -> str:
    """Return whole stories, one to a line, of at least `num_bytes` bytes in all."""
    lines: list[str] = []
    size = 0
    for story in stories(seed):
        lines.append(story + "\n")
        size += len(lines[-1].encode())
        if size >= num_bytes:
            break
    return "".join(lines)


def _person(rng: random.Random) -> tuple[str, str]:
    pronoun = rng.choice(("she", "he"))
    return rng.choice(PEOPLE[pronoun]), pronoun


def _two_people(rng: random.Random) -> tuple[tuple[str, str], tuple[str, str]]:
    first, second = _person(rng), _person(rng)
    while second[0] == first[0]:
        second = _person(rng)
    return first, second


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _many(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("x", "sh")) else "s")
    return f"{NUMBERS[count]} {noun if count == 1 else plural}"


def _errand(rng: random.Random) -> str:
    (owner, pronoun), (friend, friend_pronoun) = _two_people(rng)
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    first, second = rng.sample(sorted(PLACES), 2)
    lines = [
        f"{owner} had {_article(colour)} {thing}.",
        f"In the {rng.choice(TIMES)} {pronoun} put it on the {PLACES[first]} in the {first}.",
        f"Then {friend} came to the {first}, saw the {colour} {thing} and took it to the {second}.",
    ]
    if rng.random() < 0.5:
        lines.append(f"{owner} went to the {first}, but the {PLACES[first]} was empty.")
        lines.append(f'"Where is my {thing}?" asked {owner}.')
        lines.append(f'"It is on the {PLACES[second]} in the {second}," said {friend}.')
    else:
        lines.append(f"There {friend_pronoun} laid the {thing} on the {PLACES[second]}.")
        lines.append(f"Now the {colour} {thing} of {owner} is in the {second}.")
    return " ".join(lines)


def _counting(rng: random.Random) -> str:
    (giver, pronoun), (friend, _) = _two_people(rng)
    thing, start = rng.choice(THINGS), rng.randint(2, 9)
    gifts = rng.randint(1, start - 1)
    rest = start - gifts
    more = rng.randint(1, 12 - rest)
    verb = "was" if gifts == 1 else "were"
    she = pronoun.capitalize()
    return (
        f"{giver} had {_many(start, thing)}. {she} gave {_many(gifts, thing)} to {friend}, and there {verb} "
        f"{NUMBERS[gifts]} in the {rng.choice(('bag', 'pocket'))} of {friend}. So {giver} had {_many(rest, thing)} "
        f"left. Later {pronoun} found {_many(more, thing)} in the {rng.choice(sorted(PLACES))}. "
        f"{NUMBERS[rest].capitalize()} and {NUMBERS[more]} make {NUMBERS[rest + more]}, "
        f"so now {pronoun} has {_many(rest + more, thing)}."
    )


def _animal(rng: random.Random) -> str:
    owner, pronoun = _person(rng)
    animal, colour, place = rng.choice(sorted(ANIMALS)), rng.choice(COLOURS), rng.choice(sorted(PLACES))
    toy, food = ANIMALS[animal]
    return (
        f"{owner} and {POSSESSIVE[pronoun]} {colour} {animal} live near the {place}. Every {rng.choice(TIMES)} the "
        f"{animal} runs after {_article(toy)} and eats {food}. When the {toy} is gone, the {colour} {animal} waits by "
        f"the {PLACES[place]} in the {place}, and {owner} brings {food}, because {_article(animal)} likes {food} best."
    )


def _journey(rng: random.Random) -> str:
    traveller, pronoun = _person(rng)
    start, end = rng.sample(sorted(TOWNS), 2)
    (start_land, start_good), (end_land, end_good) = TOWNS[start], TOWNS[end]
    border = "did not cross a border" if start_land == end_land else f"crossed the border of {end_land}"
    return (
        f"{traveller} comes from {start} in {start_land}, where people sell {start_good}. Last year {pronoun} went to "
        f"{end} and {border}. The people of {end} sell {end_good}, so {traveller} bought {end_good} there and sold "
        f"{start_good}. Then {pronoun} went home to {start} in {start_land} with {end_good} from {end_land}."
    )


def _portrait(rng: random.Random) -> str:
    """A person with a surname, whose home, trade, animal and colour are the same in every story."""
    (name, pronoun), surname = _person(rng), rng.choice(SURNAMES)
    fixed = random.Random(f"{name} {surname}")
    town, trade = fixed.choice(sorted(TOWNS)), fixed.choice(sorted(TRADES))
    animal, colour, thing = fixed.choice(sorted(ANIMALS)), fixed.choice(COLOURS), fixed.choice(THINGS)
    return (
        f"{name} {surname} is a {trade} in {town}, {TOWNS[town][0]}, and makes {TRADES[trade]}. {pronoun.capitalize()} "
        f"owns a {colour} {animal} that eats {ANIMALS[animal][1]}. On {POSSESSIVE[pronoun]} door is {_article(thing)}. "
        f"If you want {TRADES[trade]} in {town}, ask for {name} {surname}, and look for the {thing} on the door."
    )


def _mood(rng: random.Random) -> str:
    (hero, pronoun), (friend, friend_pronoun) = _two_people(rng)
    mood, thing, place = rng.choice(sorted(MOODS)), rng.choice(THINGS), rng.choice(sorted(PLACES))
    sound, deed = MOODS[mood]
    return (
        f"{hero} was {mood} and {sound} in the {place}. {pronoun.capitalize()} {deed} the {thing} of {friend}. "
        f'"Why are you {mood}, {hero}?" asked {friend}, and {friend_pronoun} sat down by the {PLACES[place]}. '
        f'"I {sound} because I am {mood}," said {hero}. {MORALS[deed]}'
    )


def _scene(rng: random.Random) -> str:
    """Some sentences in one place; each word is drawn by habit from the words around it."""
    (hero, pronoun), (friend, _) = _two_people(rng)
    place = _habit(rng, sorted(PLACES), hero)
    lines, thing = [], ""
    for position in range(rng.randint(2, 5)):
        who = hero if position == 0 else rng.choice((pronoun, pronoun, friend)).capitalize()
        verb = _habit(rng, VERBS, hero if who != friend else friend, place)
        # Half of the time, repeat the thing of the sentence before.
        thing = thing if thing and rng.random() < 0.5 else _habit(rng, THINGS, verb, place)
        adjective, adverb = _habit(rng, ADJECTIVES, thing, place), _habit(rng, ADVERBS, verb, thing)
        lines.append(f"{who} {verb} the {adjective} {thing} {adverb}.")
    ending = _habit(rng, ENDINGS, lines[-1].split()[1], thing)
    return f"In the {place}: " + " ".join(lines) + f" Then {hero} {ending}."


def _habit(rng: random.Random, options: Sequence[str], *conditions: str) -> str:
    """Draw one of `options`. `conditions` decide their order; the frequency is proportional to 1 / rank^1.5."""
    order = list(options)
    random.Random("|".join(conditions)).shuffle(order)
    return rng.choices(order, cum_weights=_cumulative(len(order)))[0]


@cache
def _cumulative(num_options: int) -> list[float]:
    return list(accumulate((rank + 1) ** -1.5 for rank in range(num_options)))
