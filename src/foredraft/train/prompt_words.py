"""The words that the prompt templates are filled with."""

from __future__ import annotations

TOPICS = """photosynthesis; inflation; volcanoes; the immune system; black holes; the water cycle; democracy; gravity
electric motors; plate tectonics; vaccines; the French Revolution; supply and demand; machine learning; the Silk Road
antibiotics; glaciers; the Renaissance; neural networks; solar panels; wind turbines; evolution; the periodic table
DNA; the Roman Empire; rainbows; tides; earthquakes; batteries; encryption; the Internet; databases; operating systems
compilers; recursion; hash functions; version control; public transport; compound interest; mortgages; taxes
insurance; stock markets; trade unions; constitutions; the Cold War; the printing press; the steam engine; jazz; opera
impressionism; cubism; haiku; sonnets; the novel; Greek tragedy; Norse myths; Buddhism; stoicism; existentialism
utilitarianism; the scientific method; statistics; probability; calculus; geometry; prime numbers; logarithms; vectors
matrices; climate change; recycling; biodiversity; coral reefs; rainforests; deserts; honey bees; whales
migration of birds; mushrooms; composting; crop rotation; irrigation; bread baking; fermentation; cheese; coffee; tea
chocolate; olive oil; sleep; memory; stress; exercise; nutrition; vitamins; blood pressure; the heart; the lungs
the kidneys; the brain; chess; football; tennis; marathon running; swimming; cycling; yoga; mountain climbing; sailing
photography; film editing; architecture; suspension bridges; tunnels; skyscrapers; city planning; traffic lights
railways; airplanes; rockets; satellites; telescopes; microscopes; lasers; X-rays; magnets; sound waves; colour
optical illusions; clocks; calendars; maps; compasses; lighthouses; canals; dams; nuclear power; coal; natural gas
hydrogen; electric cars; 3D printing; robots; drones; virtual reality; video games; social media; podcasts; newspapers
advertising; copyright; patents; museums; libraries; universities; kindergartens; language learning; sign language
translation; handwriting; fonts"""

HOW_TO = """plan a birthday party; learn to play the guitar; train for a ten-kilometre run; start a vegetable garden
write a cover letter; prepare for a job interview; save money on groceries; clean a bicycle chain; repair a flat tyre
paint a room; choose a laptop; set up a home network; back up photos; make a budget; pack for a week of hiking
cook rice; bake sourdough bread; make pancakes; brew good coffee; keep houseplants alive; adopt a dog; care for a cat
learn a foreign language; give a speech; run a meeting; resolve a conflict at work; give feedback to a colleague
study for an exam; take notes in class; read faster; remember names; stop procrastinating; meditate; fall asleep
build a bookshelf; sharpen a knife; sew on a button; iron a shirt; remove a stain; unclog a sink; save water at home
write a short story; edit a video; take better photographs; draw a face; start a podcast; publish a book
organise a move; find an apartment; plan a trip to Japan; travel with children; camp in the rain; read a map
start a small business; price a product; write a business plan; answer an angry customer; hire the first employee
debug a program; review code; write unit tests; name variables well; learn Python; design a database; secure a server"""

PEOPLE = """a retired sea captain; a young violinist; a detective who hates rain; two sisters who run a bakery
a lost robot; a gardener on Mars; a shy dragon; an old clockmaker; a boy who talks to crows
a chef who lost her sense of taste; a librarian with a secret; a taxi driver in Cairo; a nurse on the night shift
a fox and a hedgehog; the last lighthouse keeper; a time traveller who is always late; a girl who collects maps
a painter who sees in black and white; a stray cat; a mathematician in love; a farmer and a talking horse
an astronaut who misses the sea; a thief who returns things; a grandfather and his grandson
a mechanic who builds wings; a teacher in a mountain village; three friends on a raft"""

ROLES = """a travel guide in Lisbon; a wise old wizard; a patient maths teacher; a doctor who explains things simply
a football coach before the final; a grumpy chef; a medieval knight; a startup founder; a museum guide; a librarian
an alien who visits Earth for the first time; a detective; a fitness trainer; a career adviser; a poet; a news reader
a grandmother who knows every recipe; a science journalist; a lawyer; a gardener; an economist; a sailor; a robot"""

PLACES = """Norway; Kenya; Vietnam; Peru; Iceland; Morocco; New Zealand; Portugal; Canada; Greece; Mexico; India
Turkey; Chile; Edinburgh; Kyoto; Istanbul; Prague; Cape Town; Buenos Aires; Vancouver; Marrakesh; Barcelona
Copenhagen; Seoul; Naples"""

CODE_TASKS = """reverses a linked list; counts the words in a text; merges two sorted lists
checks whether a string is a palindrome; finds the largest element of a list without max
removes duplicates from a list and keeps the order; computes a factorial; parses a CSV line
converts Celsius to Fahrenheit; validates an e-mail address; flattens a nested list; sorts words by length
finds the two numbers in a list that add up to a target; computes the greatest common divisor; rotates a matrix
counts vowels in a string; checks whether brackets are balanced; performs a binary search; implements bubble sort
implements quicksort; implements a stack class; implements a queue with two stacks; reads a file and prints each line
writes a dictionary to a JSON file; downloads a web page and prints its title
computes the mean and the median of a list; groups words by their first letter; finds the longest common prefix
converts a Roman numeral to an integer; generates all permutations of a string; computes the Levenshtein distance
prints a multiplication table; shuffles a deck; simulates rolling two dice; checks whether a year is a leap year
formats a duration in seconds as hours and minutes; finds prime numbers below n; computes the n-th triangular number
transposes a matrix; implements a simple bank account class; counts the occurrences of each character
capitalises each word; removes punctuation; encrypts a text with a Caesar cipher; finds the intersection of two lists
splits a list into chunks; implements depth-first search; implements breadth-first search
inserts a node into a binary search tree; computes the height of a tree; implements an LRU cache
retries a function on errors; measures how long a function takes; validates a password; converts a number to binary
finds missing numbers in a range"""

LANGUAGES = ["Python"] * 6 + ["JavaScript", "Java", "C", "C++", "Go", "Rust", "SQL", "Bash"]

NAMES = """Tom; Maria; Ahmed; Lucy; Chen; Priya; Olga; Ben; Sofia; Kofi; Emma; Diego; Hana; Viktor; Amara; Paul; Ines
Noah; Leila; Marco"""

GOODS = """apples; pencils; stickers; marbles; books; cookies; tickets; flowers; stamps; bottles; eggs; candles
cards; coins; shells"""

TONGUES = """French; Spanish; German; Italian; Portuguese"""

SENTENCES = """The train to the coast leaves at half past seven.; My sister bought a red bicycle last week.
Could you please send me the report before Friday?; The weather was so bad that we stayed at home.
He has been learning the piano for three years.; The museum is closed on Mondays.; We are looking for a quiet hotel.
If it rains tomorrow, the match will be cancelled.; She opened the window because the room was too warm.
Nobody knew where the old key had been hidden.; I would like a table for two, please.
The children played in the garden.; The company plans to open a new office in the north.
There is a pharmacy next to the station.; Thank you for your help."""


def split(text: str) -> list[str]:
    """The entries of one of the lists above."""
    return [entry.strip() for line in text.splitlines() for entry in line.split(";") if entry.strip()]
