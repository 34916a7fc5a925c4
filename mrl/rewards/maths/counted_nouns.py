"""Nouns that word problems count: after a number, each is a unit of its own.

The list is closed: any other word is not a unit. Words that change a number (pairs, dozens, halves) are left
out on purpose.
"""

_FORMS = """
    unit units person people man men woman women child children kid kids boy boys girl girls student students
    teacher teachers parent parents friend friends guest guests visitor visitors customer customers passenger
    passengers employee employees worker workers member members player players team teams family families
    point points mark marks goal goals vote votes game games match matches round rounds lap laps trip trips
    step steps page pages book books notebook notebooks word words letter letters question questions problem
    problems line lines song songs movie movies episode episodes photo photos picture pictures painting
    paintings message messages text texts ticket tickets card cards stamp stamps sticker stickers coin coins
    bill bills token tokens penny pennies nickel nickels dime dimes marble marbles ball balls balloon balloons
    toy toys doll dolls block blocks brick bricks tile tiles bead beads button buttons shell shells seashell
    seashells stick sticks pencil pencils pen pens crayon crayons paper papers sheet sheets envelope envelopes
    box boxes bag bags can cans bottle bottles jar jars case cases crate crates container containers package
    packages pack packs basket baskets bucket buckets plate plates dish dishes glass glasses spoon spoons
    piece pieces slice slices serving servings scoop scoops bar bars item items object objects group groups
    section sections class classes batch batches load loads room rooms house houses home homes floor floors
    table tables chair chairs seat seats desk desks machine machines car cars truck trucks bus buses bike
    bikes wheel wheels tree trees plant plants flower flowers rose roses leaf leaves seed seeds petal petals
    fruit fruits apple apples orange oranges banana bananas lemon lemons peach peaches pear pears grape grapes
    strawberry strawberries blueberry blueberries berry berries tomato tomatoes potato potatoes vegetable
    vegetables carrot carrots nut nuts egg eggs cookie cookies cake cakes cupcake cupcakes muffin muffins
    brownie brownies pie pies pizza pizzas pancake pancakes donut donuts doughnut doughnuts candy candies
    chocolate chocolates lollipop lollipops sweet sweets sandwich sandwiches loaf loaves meal meals calorie
    calories animal animals pet pets dog dogs cat cats puppy puppies kitten kittens cow cows goat goats sheep
    horse horses pig pigs chicken chickens duck ducks bird birds fish fishes frog frogs turtle turtles insect
    insects ant ants bug bugs mouse mice lion lions rabbit rabbits leg legs shirt shirts hat hats shoe shoes
    dress dresses sock socks gift gifts pill pills star stars hole holes digit digits integer integers number
    numbers solution solutions way ways edge edges side sides vertex vertices face faces triangle triangles
    subset subsets
"""
COUNTED = frozenset(_FORMS.split())
"""Singular and plural forms."""

_IRREGULAR = {
    "people": "person", "men": "man", "women": "woman", "children": "child", "mice": "mouse",
    "leaves": "leaf", "loaves": "loaf", "vertices": "vertex",
}  # fmt: skip


def singular(noun: str) -> str:
    """Return the singular of a counted noun, so that "boxes" and "box" are the same unit."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    for ending, replacement in (("ies", "y"), ("es", ""), ("s", "")):
        stem = noun.removesuffix(ending) + replacement
        if noun.endswith(ending) and stem in COUNTED:
            return stem
    return noun
