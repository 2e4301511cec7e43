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
translation; handwriting; fonts
the water supply of a city; tornadoes; hurricanes; snow; clouds; lightning; the ozone layer; the moon
the planet Mars; the sun; comets; galaxies; the Big Bang; the speed of light; relativity; quantum mechanics; atoms
chemical bonds; acids and bases; metals; plastics; glass; paper; wood; concrete; steel; gold; diamonds; salt; sugar
spices; rice; potatoes; corn; wheat; apples; bananas; tomatoes; wine; beer; milk; butter; pasta; pizza; sushi; soup
vegetarian food; food safety; diets; allergies; the common cold; influenza; diabetes; cancer; the skin; the eyes
hearing; teeth; bones; muscles; hormones; genes; stem cells; viruses; bacteria; parasites; first aid; hospitals
nurses; surgery; mental health; anxiety; depression; happiness; motivation; habits; friendship; marriage; parenting
childhood; old age; loneliness; empathy; honesty; courage; ambition; creativity; intelligence; dreams; emotions
body language; humour; love; trust; leadership; teamwork; remote work; interviews; salaries; pensions; unemployment
small businesses; startups; marketing; branding; customer service; supply chains; warehouses; factories
assembly lines; globalisation; trade tariffs; central banks; interest rates; credit cards; cryptocurrency; budgeting
poverty; charity; housing; rent; public parks; bicycles; buses; subways; ferries; container ships; harbours; bridges
roads; motorways; electric scooters; helicopters; balloons; parachutes; submarines; oceans; rivers; lakes
waterfalls; islands; mountains; caves; canyons; swamps; savannas; the Arctic; Antarctica; the Amazon; the Sahara
elephants; lions; wolves; bears; dolphins; sharks; octopuses; penguins; owls; eagles; snakes; frogs; spiders; ants
butterflies; bees and flowers; dogs; cats; horses; cows; chickens; dinosaurs; fossils; mammoths; human origins
the Stone Age; ancient Egypt; ancient Greece; the Vikings; the Middle Ages; castles; knights; the Black Death
the Ottoman Empire; the Ming dynasty; the Aztecs; the Incas; Columbus; colonialism; slavery; the American Civil War
the Industrial Revolution; the First World War; the Second World War; the space race; the fall of the Berlin Wall
human rights; women's suffrage; elections; parliaments; courts; police; prisons; international law
the United Nations; the European Union; refugees; immigration; borders; passports; national holidays; Christmas
Ramadan; Diwali; weddings; funerals; fashion; jeans; shoes; jewellery; perfume; tattoos; hairstyles; furniture
gardens; houseplants; paint; ceramics; weaving; origami; drawing; sculpture; street art; theatre; ballet; hip-hop
rock music; classical music; folk songs; the piano; the violin; drums; singing; radio; television; cinema; animation
comics; fairy tales; science fiction; detective stories; biographies; diaries; letters; poetry; grammar; spelling
accents; slang; emoji; e-mail; search engines; web browsers; smartphones; computers; keyboards; screens; printers
cameras; microphones; sensors; GPS; barcodes; passwords; computer viruses; cloud computing; open-source software
programming languages; variables and types; loops; functions in programming; object-oriented programming
sorting algorithms; data structures; binary numbers; graphs; Boolean logic; artificial intelligence; language models
self-driving cars; facial recognition; privacy; online shopping; e-books; e-learning; homework; exams
school uniforms; libraries in schools; playgrounds; toys; board games; card games; puzzles; magic tricks; basketball
baseball; rugby; golf; boxing; judo; skiing; ice skating; surfing; rowing; horse riding; dance; the Olympic Games
referees; fans; camping; fishing; birdwatching; gardening; knitting; cooking; travel; hotels; airports; tourism
souvenirs; markets; supermarkets; restaurants; cafes; street food; festivals; fireworks; circuses; zoos; aquariums
botanical gardens; national parks; forest fires; floods; droughts; pollution; plastic waste; noise; light pollution
energy saving; insulation; heat pumps; air conditioning; refrigerators; washing machines; elevators; escalators
locks and keys; tools; screws; pulleys; levers; gears; springs; pumps; engines; bicycles in cities; fractions
percentages; averages; negative numbers; algebra; equations; triangles; circles; symmetry; infinity; randomness
game theory; logic; paradoxes; free will; ethics; justice; freedom; time; consciousness; knowledge; truth; beauty
religion; mythology; superstition; rumours; propaganda; debates; negotiation; diplomacy; volunteering
neighbourhoods"""

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
debug a program; review code; write unit tests; name variables well; learn Python; design a database; secure a server
write a thank-you note; plan a wedding; organise a bookshelf; declutter a wardrobe; clean a kitchen; wash a car
change a light bulb; hang a picture; fix a dripping tap; install a shelf; build a birdhouse; plant a tree
grow tomatoes; make compost; make lemonade; cook pasta; roast a chicken; make vegetable soup; bake a chocolate cake
make yoghurt; freeze food; read a food label; lose weight; gain muscle; improve posture; stretch in the morning
run a marathon; swim faster; learn to ski; teach a child to read; help with homework; calm a crying baby
make new friends; apologise sincerely; say no politely; deal with a difficult neighbour; cope with stress
get over a breakup; wake up early; keep a diary; set goals; manage time; work from home; ask for a raise
change careers; write a resume; network at a conference; prepare a presentation; take minutes of a meeting
write a press release; make a website; choose a domain name; sell things online; start a blog; grow a newsletter
take part in a debate; write a poem; write a song; learn to sing; play chess; solve a crossword; learn to juggle
do a card trick; knit a scarf; paint with watercolours; photograph the night sky; choose a telescope; buy a used car
read a contract; open a bank account; invest in index funds; pay off debt; plan for retirement; file a tax return
find a scholarship; apply to a university; write an essay; cite sources; read a scientific paper
do a literature review; run a survey; make a chart; clean data in a spreadsheet; learn SQL; learn JavaScript
use Git; write documentation; report a bug; choose a password; spot a phishing mail; set up a printer
speed up an old computer; recycle electronics; travel cheaply; pack a suitcase; deal with jet lag
survive a long flight; rent a car abroad; learn some Spanish before a trip; visit a museum with children
plan a picnic; build a campfire; cross a river safely; predict the weather; treat a sunburn
help somebody who fainted; prepare for a storm"""

PEOPLE = """a retired sea captain; a young violinist; a detective who hates rain; two sisters who run a bakery
a lost robot; a gardener on Mars; a shy dragon; an old clockmaker; a boy who talks to crows
a chef who lost her sense of taste; a librarian with a secret; a taxi driver in Cairo; a nurse on the night shift
a fox and a hedgehog; the last lighthouse keeper; a time traveller who is always late; a girl who collects maps
a painter who sees in black and white; a stray cat; a mathematician in love; a farmer and a talking horse
an astronaut who misses the sea; a thief who returns things; a grandfather and his grandson
a mechanic who builds wings; a teacher in a mountain village; three friends on a raft
a baker who cannot wake up; a king without a country; a girl and her kite; an owl who is afraid of the dark
two rival inventors; a postman in the mountains; a ghost who likes jazz; a pirate who hates water; a clever mouse
a soldier who comes home; a tailor and a magic needle; a tired superhero; a scientist who shrinks; a bridge builder
a boy and a snowman; an old woman who feeds pigeons; a photographer in a desert; a musician without an instrument
a judge who forgets; a wolf in a city; a tree that speaks; a family that moves to the moon; a swimmer and a seal
a bookseller and a mysterious letter; a student who finds a door; a village without music; a turtle who wants to fly
a cook and a king; an engineer on a sinking ship; a princess who repairs clocks"""

ROLES = """a travel guide in Lisbon; a wise old wizard; a patient maths teacher; a doctor who explains things simply
a football coach before the final; a grumpy chef; a medieval knight; a startup founder; a museum guide; a librarian
an alien who visits Earth for the first time; a detective; a fitness trainer; a career adviser; a poet; a news reader
a grandmother who knows every recipe; a science journalist; a lawyer; a gardener; an economist; a sailor; a robot
a tour guide in ancient Rome; a pirate captain; a kindergarten teacher; a hotel receptionist; a nutritionist
a history professor; a mountain rescuer; a film critic; a sports commentator; a philosopher; a beekeeper
a carpenter; a farmer; a judge; a diplomat; a psychologist; a nurse; a pilot; an architect; a data scientist
a software tester; a customer support agent; a salesperson; a painter; a ghost; a cat; a talking tree
a time traveller"""

PLACES = """Norway; Kenya; Vietnam; Peru; Iceland; Morocco; New Zealand; Portugal; Canada; Greece; Mexico; India
Turkey; Chile; Edinburgh; Kyoto; Istanbul; Prague; Cape Town; Buenos Aires; Vancouver; Marrakesh; Barcelona
Copenhagen; Seoul; Naples
Italy; Spain; France; Germany; Ireland; Scotland; Sweden; Finland; Poland; Hungary; Croatia; Egypt; South Africa
Tanzania; Thailand; Indonesia; Japan; China; Nepal; Australia; Brazil; Argentina; Colombia; Costa Rica; Cuba
New York; San Francisco; Chicago; London; Paris; Rome; Vienna; Berlin; Amsterdam; Athens; Dublin; Bangkok; Singapore
Sydney; Toronto; Hawaii; Alaska; the Alps; the Scottish Highlands"""

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
finds missing numbers in a range
sums the digits of a number; checks whether two strings are anagrams; finds the second largest number
computes the power of a number; prints the Fibonacci sequence; counts the lines of a file
replaces spaces with underscores; converts a string to title case; finds the most common word
sorts a list of dictionaries by a key; merges two dictionaries; zips two lists into a dictionary
checks whether a number is prime; prints a pyramid of stars; computes the area of a circle
computes compound interest; converts kilometres to miles; parses a date; computes the days between two dates
validates a credit card number; generates a random password; reverses the words in a sentence; finds all substrings
counts words in a file; reads a CSV file and computes averages; sends an HTTP request; parses JSON
logs messages to a file; implements a linked list; implements a hash table; implements a priority queue
implements merge sort; implements insertion sort; finds the shortest path in a graph
detects a cycle in a linked list; checks whether a tree is balanced; prints a tree level by level
solves the Tower of Hanoi; solves the eight queens problem; computes the dot product of two vectors
multiplies two matrices; draws a rectangle with characters; plays rock, paper, scissors
plays a number guessing game; keeps a to-do list; models a library with books; models a parking lot
implements a timer; implements a calculator; selects the customers with the most orders
joins two tables and counts rows; finds duplicate rows; lists files in a folder by size
renames all files in a folder"""

LANGUAGES = ["Python"] * 6 + ["JavaScript", "Java", "C", "C++", "Go", "Rust", "SQL", "Bash"]

NAMES = """Tom; Maria; Ahmed; Lucy; Chen; Priya; Olga; Ben; Sofia; Kofi; Emma; Diego; Hana; Viktor; Amara; Paul; Ines
Noah; Leila; Marco"""

GOODS = """apples; pencils; stickers; marbles; books; cookies; tickets; flowers; stamps; bottles; eggs; candles
cards; coins; shells"""

TONGUES = """French; Spanish; German; Italian; Portuguese
Dutch; Polish; Swedish"""

SENTENCES = """The train to the coast leaves at half past seven.; My sister bought a red bicycle last week.
Could you please send me the report before Friday?; The weather was so bad that we stayed at home.
He has been learning the piano for three years.; The museum is closed on Mondays.; We are looking for a quiet hotel.
If it rains tomorrow, the match will be cancelled.; She opened the window because the room was too warm.
Nobody knew where the old key had been hidden.; I would like a table for two, please.
The children played in the garden.; The company plans to open a new office in the north.
There is a pharmacy next to the station.; Thank you for your help.
The bakery opens at six in the morning.; My grandfather planted this tree fifty years ago.
We missed the last bus and had to walk.; Please close the door when you leave.; The soup needs a little more salt.
They have lived in this village since 1998.; I forgot my umbrella at the office.
Can you tell me where the post office is?; Our flight was delayed by three hours.; The dog barked all night.
She speaks four languages fluently.; The shop offers a discount to students.
We will meet in front of the theatre at eight.; His new novel was translated into ten languages.
The river is too cold for swimming."""


def split(text: str) -> list[str]:
    """The entries of one of the lists above."""
    return [entry.strip() for line in text.splitlines() for entry in line.split(";") if entry.strip()]
