"""What the task's slots are filled with: for each class values to train with and, after the bar,
others that are held out.

A value may be made of other classes (`{number} am`), and may be a structure of its own:
`GET_CONTACT: ...` nests that intent. Names and titles are composed, so that there are too many to
be learned by heart: what is not in the lists has to be copied. For the same reason two of three
training values of a class marked `~` are `{novel}`: any word, or one that nobody has heard. Those
any words, five thousand of them, are `task_words.txt`: words that GSM8K's questions,
self-instruct's and WikiText-2 use at least twice, less all that this grammar says. Classes without
a bar belong to both parts, or to the training part alone where only its values name them. All lists
are our own.
"""

from __future__ import annotations

ENTITIES = """
number: 1; 3; 4; 6; 7; 9; 10; 12; 13; 14; 16; 17; 19; 21; 22; 23; {one}{one}; {one}{one}; {one}{one}; {one}{one} | 2; 5; 8; 11
minutes: 15; 30; 40; 50; 05; 12; 35; {ten}{one}; {ten}{one}; {ten}{one}; {ten}{one}; {ten}{one} | 20; 45; 10; 25
half: am; pm; am; pm; in the {novel}; at {novel} | in the morning; in the evening; am; pm
clock: {number} {half}; {number}:{minutes}; {number}:{minutes} {half}; {noon}
noon: noon; half past {number}; {novel} past {number}; {novel} past {number}; {novel}; twenty to {number}; {novel} to {number} |
  midnight; quarter past {number}
weekday: monday; tuesday; thursday; saturday; monday; tuesday; thursday; saturday; christmas; easter; halloween; thanksgiving;
  {novel}; {novel}; {novel} | wednesday; friday; sunday
one: 1; 2; 3; 4; 6; 7; 8; 9
ten: 0; 1; 2; 3; 4; 5
month~: january; march; april; june; august; october; december | february; may; july; november
day: {today}; on {weekday}; next {weekday}; on {weekday} {daypart}; {today}; on {month} {number}; on the {number} of {month}
date: {today}; {weekday}; next {weekday}; {weekday} {daypart}; {today}; {month} {number}; the {number} of {month}
today: today; tomorrow; this weekend; the day after tomorrow; next week; in {amount} days; this {novel}; next {novel}; this
  {novel}; next {novel}; this {novel} | tonight; this evening; next month; this week
daypart: morning; afternoon; {novel} | evening; night
time: {weekday} at {clock}; {clock}; {weekday} {daypart} at {clock}; {month} {number} at {clock}
repeat: every {weekday}; every {daypart}; every {amount} days
amount: 4; 9; 12; 15; 25; 30; 40; 55; 90; ten; three; five; twelve; forty; {one}{ten}{one}; {one}{ten}{one}; thirteen; seventy;
  eighty; nine; {novel}; {novel}; {novel}; {novel}; {novel}; {novel}; {novel}; {novel} | 6; 8; 14; 20; 35; 50; seven; two;
  eleven; sixty
unitspan: minutes; hours; seconds | minutes; hours; seconds
span: {amount} {unitspan}; {amount} {unitspan}; {amount} {unitspan}; {longspan}
longspan: half an hour; one hour and {amount} minutes; a {novel} of an hour; {novel} hours and {amount} minutes; a {novel} | a
  quarter of an hour; two hours and {amount} minutes
color~: red; green; silver; black; golden; brown; white; orange; pink | blue; yellow; purple; gray; copper; ivory
tone~: big; old; quiet; broken; sweet; wild; lonely; cold; lucky; little; secret; burning; distant; gentle; paper; electric;
  hollow; final; new; crystal | small; young; loud; hidden; bitter; bright; restless; warm; empty; early; velvet; frozen; last;
  perfect
thing~: river; moon; road; heart; house; garden; window; train; letter; ocean; summer; mirror; shadow; station; bridge; candle;
  engine; valley; island; storm; piano; forest | light; mountain; door; rain; city; winter; bird; harbor; desert; tower; clock;
  boat; field; fire
animals~: foxes; wolves; kings; sisters; riders; hunters; strangers; pilots; painters; dancers; rabbits; bears; poets; tigers |
  owls; sailors; horses; brothers; dreamers; giants; ravens; farmers
label: {activity}; {tone} {activity}; {activity} with {name}; {activity}
activity~: work; gym; running; school; medicine; yoga; breakfast; piano; fishing; training; homework; market; chess; lecture;
  boxing; painting; driving lesson; church; shopping; office | swimming; shift; lunch; meditation; laundry; violin; tennis;
  dentist; garden work; choir; rehearsal
dish: {food}; {color} {food}; {tone} {food}; {food} and {food}; {food}
food~: pasta; rice; pizza; eggs; cookies; chicken; tea; potatoes; bread; pie; turkey; carrots; pancakes; steak; onions; muffins;
  stew; dumplings; broccoli; oatmeal; ribs | soup; lasagna; cake; noodles; coffee; fish; beans; salmon; waffles; peppers; jam;
  mushrooms
todo: {verb} {object}; {verb} {object}; {errand}
verb~: buy; pick up; return; clean; look for; pay for; bring; paint; lend; carry; replace; unpack | order; fix; wash; pack;
  wrap; sell; borrow; measure
object: the {goods}; a {tone} {goods}; {amount} {color} {goods}; the {color} {goods}; {name}'s {goods}
goods~: milk; books; keys; card; flowers; charger; suitcase; tickets; lamp; boots; shelf; batteries; camera bag; umbrella;
  blanket; printer; ladder; shirts; basket; speakers | groceries; jacket; bicycle; chairs; stamps; gift; tent; curtains; helmet;
  candles; bottles; carpet
errand: {novel} the {thing}; {novel} {novel} the {goods}; {novel} {novel} {novel} {novel}; {novel} {novel} with the {novel}
  {novel}; {verb} {novel} {thing}; {novel} with {name}; water the plants; call {name}; feed the {animals}; renew the passport;
  walk with {name}; finish the {thing} report; take out the trash; book a room in {city}; meet {name}; study for the {activity}
  test | charge the camera; visit {name}; empty the dishwasher; answer {name}; practice the {thing} song; prepare the slides;
  check the oven; write about the {thing}
first~: anna; david; maria; john; peter; susan; ahmed; linda; robert; emily; carlos; julia; kevin; nina; george; olga; frank;
  ruth; ivan; grace; pablo; diana; walter; yuki; steven; fatima; oscar; claire; tony; megan | martin; sarah; thomas; rachel;
  hassan; sophie; brian; laura; miguel; helen; victor; amy; dennis; paula; simon; leila
surname~: smith; jones; brown; walker; miller; garcia; novak; stone; fisher; rossi; morgan; baker; lopez; young; turner | green;
  clark; porter; king; rivera; meyer; wood; larsen; bell
name: {first}; {first}; {first} {surname}
mine: my; her; our | his; my
relation~: mom; dad; sister; brother in law; boss; neighbor; wife; cousin; roommate; landlord; son; grandfather; best friend |
  husband; aunt; teacher; daughter; uncle; grandmother; coach
contact: {name}; {name}; GET_CONTACT: {CONTACT_RELATED=mine} {TYPE_RELATION=relation}
song: {tone} {thing}; {thing} of the {thing}; the {color} {thing}; {first} and the {thing}; my {tone} {thing}; {thing} song;
  {amount} {animals}; {novel} {thing}; {thing} {novel} {thing}; {novel} {novel}; {novel} {novel} {novel}; {novel} {novel}
  {novel} {novel} | {tone} {thing}; the {tone} {thing}; {color} {thing}; {thing} and {thing}; your {thing}; {thing} for {first}
artist: the {color} {animals}; {name}; dj {first}; the {tone} {animals}; {first} and the {animals}; the {novel}s; {novel}
  {novel}s; {novel} {first} | the {animals}; {name}; the {tone} {thing}s; {color} {thing}; mc {first}
genre~: jazz; rock; classical; hip hop; country; techno; folk; latin; opera; swing; house; punk | blues; reggae; pop; metal;
  soul; gospel
provider~: spotify; pandora; apple music; youtube; soundcloud | deezer; tidal; amazon music
release~: song; album; track | single; record
playlist: {activity} mix; {tone} {thing}; best of {genre}; {today} music; {color} {thing}; {first}'s party; {activity}; {genre}
  {novel}; {novel} {thing}; {novel} for {novel}; {first}'s {novel}; {novel} {novel}; {novel} {novel} {novel} | {genre} hits;
  {tone} evening; {thing} sounds; music for {activity}; {first}'s favorites
city~: boston; san diego; paris; chicago; new york; london; tokyo; madrid; seattle; denver; cape town; houston; berlin; miami;
  lima; prague; vienna; cairo; austin; geneva; mumbai; helsinki; nairobi; warsaw; santiago; manila; phoenix; naples; lisbon;
  detroit | dallas; rome; portland; sydney; toronto; las vegas; oslo; dublin; mexico city; atlanta; athens; seoul; boise;
  havana; zurich
rain~: rain; snow; be sunny; be windy; be {novel}; be {novel} | hail; storm; be cloudy; be foggy
warm~: hot; cold; windy; humid | warm; chilly; sunny; dry
unit~: celsius; fahrenheit | kelvin
news: {subject} {event_news}; {statement}; {statement}
subject: the meeting; the party; the game; dinner; the flight; the {activity} class; {name}; the {novel}; the {thing} {novel} |
  lunch; the concert; the train; the movie; the {thing} tour
event_news: is cancelled; starts at {clock}; will be late; was moved to {weekday}; needs {amount} {goods}; is {novel}; was
  {novel}; {novel} {amount} {novel} | is delayed; begins at {clock}; was great; is on {weekday}; costs {amount} dollars
statement: i will be there in {span}; i am on my way; the {goods} are on the table; i love the {color} {goods}; the {food} is
  ready; we need more {food}; i can not come {today}; happy birthday; {name} says hello; i saw {animals} near {city}; i {novel}
  {novel}; we {novel} {novel} {novel}; the {novel} is {novel}; {name} is {novel} in {city}; i am {novel}; {novel} {novel}
  {novel}; {novel} {novel} {novel} {novel}; {novel} {novel} the {novel} {novel} {novel}; {novel} {novel} {novel} {novel} {novel}
  | i am stuck at work; the {goods} have arrived; i forgot my {goods}; we are out of {food}; see you {today}; i am home in
  {span}; congratulations; i met {name} in {city}
app~: whatsapp; messenger; instagram; skype | telegram; signal; slack
group: family; {activity}; {color} {animals}; {city} friends; project {thing}; {activity} {novel}; {city} {novel}; our {novel} |
  neighbors; {activity} club; old classmates; the {animals}; {city} office
ordinal~: first; last; second; fourth | third; latest; fifth
reaction~: heart; thumbs up; smile; laughing face; kiss; fire | wave; sad face; star; clap
place: {city}; {spot}; {spot}; GET_LOCATION: {mod} {CATEGORY_LOCATION=category}; GET_LOCATION: {SEARCH_RADIUS=near}
  {CATEGORY_LOCATION=category}; GET_LOCATION_HOME: {CONTACT=owner} house
owner: {name}'s; GET_CONTACT: {CONTACT_RELATED=mine} {TYPE_RELATION=relation}'s
mod: the; this; that; one | some; any
near: the nearest; the closest; the next; a {novel}; a {novel}; a {novel} | a nearby; a good
category~: gas station; hospital; coffee shop; parking garage; supermarket; pharmacy; post office; train station; gym; hotel;
  bank; shoe store; library | bakery; museum; police station; bookstore; car wash; drugstore; bus stop; toy store
spot: {thing} park; {surname} street; {color} {building}; {city} airport; {tone} {thing} square; {surname} high school; {thing}
  {building}; {surname} {novel}; {thing} {novel}; {novel} of {city}; {color} {thing} {novel}; {novel} {novel}; {novel} {novel}
  {novel} | {thing} road; {surname} avenue; {building} of {city}; {color} {thing} plaza; {surname} college
building~: stadium; theater; mall; cathedral; market; hall; factory | opera house; gallery; castle; terminal; temple
vehicle~: car; bus; train; foot; plane | bike; taxi; subway; boat
obstacle~: tolls; highways; the bridge; construction; {city}; {surname} street; {surname} {novel}; the {novel} | ferries;
  traffic; the tunnel; accidents; {surname} avenue
event~: concerts; art shows; food festivals; movies; football games; {thing} festivals; {genre} nights; {novel} {novel}s;
  {genre} {novel} | plays; comedy shows; street fairs; lectures; wine tastings; {genre} concerts
meeting: a team lunch; the budget meeting; a video call; game night; a job interview; a {activity} session; the {thing} review;
  a picnic; a {novel} {novel}; the {novel}; {novel} {novel}; the {activity} {novel} | a planning session; a birthday dinner; the
  sales meeting; movie night; a phone call; the {activity} party
novel: {word}; {word}; {word}; {made}
opener: hey; ok; would you; can you; kindly; i want you to; go ahead and; now; listen; i need you to; will you; just; quickly;
  yes; so; um; hello {novel}; hey {novel}; {novel}; {novel}; i wonder; say; well; do me a favor and; my friend; {novel} {novel}
made: {syllable}; {onset}{vowel}{syllable}; {onset}{vowel}{onset}{vowel}; {syllable}{vowel}; {syllable}{onset}{vowel};
  {onset}{vowel}{onset}{vowel}{coda}
syllable: {onset}{vowel}{coda}
onset: b; bl; br; c; ch; cl; cr; d; dr; f; fl; fr; g; gl; gr; h; j; k; l; m; n; p; ph; pl; pr; qu; r; s; sc; sh; sl; sm; sn; sp;
  st; str; t; th; tr; v; w; y; z
vowel: a; e; i; o; u; a; e; i; o; u; ai; ea; ee; oa; oo; ou; ie
coda: b; ck; d; ff; g; l; ll; m; mp; n; nd; ng; nt; p; r; rd; rk; rn; rt; s; sh; sk; ss; st; t; th; x
"""
