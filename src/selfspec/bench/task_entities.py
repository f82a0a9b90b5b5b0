"""What the task's slots are filled with: for each class values to train with and, after the bar, others that are held out.

A value may be made of other classes (`{number} am`), and may be a structure of its own: `GET_CONTACT: ...` nests that intent.
Classes without a bar hold no words of their own, only compositions, which the two parts share. All lists are our own.
"""

from __future__ import annotations

ENTITIES = """
number: 1; 3; 4; 6; 7; 9; 10; 12 | 2; 5; 8; 11
minutes: 15; 30; 40; 50; 05 | 20; 45; 10; 25
half: am; pm | in the morning; in the evening; am; pm
clock: {number} {half}; {number}:{minutes}; {number}:{minutes} {half}; {noon}
noon: noon; half past {number} | midnight; quarter past {number}
weekday: monday; tuesday; thursday; saturday | wednesday; friday; sunday
day: {today}; on {weekday}; next {weekday}; {weekday} {daypart}; {today}
today: today; tomorrow; this weekend; the day after tomorrow; next week | tonight; this evening; next month; this week
daypart: morning; afternoon | evening; night
time: {weekday} at {clock}; {clock} {today}; {clock}; {weekday} {daypart} at {clock}
repeat: every {weekday}; every {daypart}
amount: 4; 9; 12; 15; 25; 30; 40; ten; three; five | 6; 8; 14; 20; 35; 50; seven; two; eleven
unitspan: minutes; hours; seconds | minutes; hours; seconds
span: {amount} {unitspan}; {amount} {unitspan}; {amount} {unitspan}; {longspan}
longspan: half an hour; one hour and {amount} minutes | a quarter of an hour; two hours and {amount} minutes
label: work; gym; morning run; school; medicine; train; yoga class; breakfast; piano; early shift | swimming; late shift;
  lunch; meditation; bus; laundry; violin; tennis match
dish: pasta; rice; pizza; eggs; cookies; chicken; tea; roast potatoes; bread; apple pie | soup; lasagna; cake; noodles;
  coffee; grilled fish; beans; banana bread
todo: {verb} {object}; {verb} {object}; {errand}
verb: buy; pick up; return; clean; look for; pay for; bring | order; fix; wash; pack; wrap; sell
object: the milk; the library books; the car keys; a birthday card; the dry cleaning; some flowers; the kitchen floor; a new
  phone charger; the blue suitcase; two bags of rice; the concert tickets | the groceries; a winter jacket; the bicycle; the
  garden chairs; some stamps; a wedding gift; the front window; the camping tent; three boxes of tea
errand: water the plants; call the dentist; feed the cat; renew the passport; walk the dog; finish the report; take out the
  trash; book a hotel room | charge the camera; visit the bank; empty the dishwasher; answer the lawyer; practice the guitar;
  prepare the slides; check the oven
name: anna; david; maria; john smith; peter; susan; ahmed; linda; robert jones; emily; carlos; julia; kevin; nina; george;
  olga | martin; sarah; thomas; rachel green; hassan; sophie; brian; laura; miguel; helen clark; victor; amy
mine: my; her; our | his; my
relation: mom; dad; sister; brother in law; boss; neighbor; wife; cousin; roommate | husband; aunt; teacher; daughter; uncle;
  grandmother; coach
contact: {name}; {name}; GET_CONTACT: {CONTACT_RELATED=mine} {TYPE_RELATION=relation}
song: yellow river; the long way home; blue monday; paper hearts; dancing in the snow; golden hour; stay with me; summer rain;
  ten thousand miles; midnight train; letters to you; silver moon | broken wings; under the bridge; wild horses; city lights;
  one more night; winter song; falling stars; the last goodbye; open road
artist: the velvet foxes; mary stone; johnny walker; the northern lights; ella brown; red canyon; the paper kites; dj morgan;
  lucas gray; the seven sisters | black harbor; nora king; the lonely hearts; max rivers; blue orchid; the quiet men; sam
  porter; ivory coast
genre: jazz; rock; classical; hip hop; country; techno; folk; latin | blues; reggae; pop; metal; soul; gospel
provider: spotify; pandora; apple music; youtube | deezer; tidal; amazon music
release: song; album; track | single; record
playlist: road trip; workout; chill evening; party hits; sunday brunch; study time; best of summer | dinner jazz; morning
  energy; deep focus; rainy days; family favorites; dance floor
city: boston; san diego; paris; chicago; new york; london; tokyo; madrid; seattle; denver; cape town; houston; berlin; miami |
  dallas; rome; portland; sydney; toronto; las vegas; oslo; dublin; mexico city; atlanta
rain: rain; snow; be sunny; be windy | hail; storm; be cloudy; be foggy
warm: hot; cold; windy; humid | warm; chilly; sunny; dry
unit: celsius; fahrenheit | kelvin
news: {subject} {event_news}; {statement}; {statement}
subject: the meeting; the party; the game; dinner; the flight | lunch; the concert; the class; the train
event_news: is cancelled; starts at {clock}; will be late; was moved to {weekday} | is delayed; begins at {clock}; was great;
  is on {weekday}
statement: i will be there in {span}; i am on my way; the keys are on the table; i love the new house; dinner is ready; we
  need more milk; i can not come {today}; happy birthday | i am stuck at work; the package has arrived; i forgot my wallet; we
  are out of coffee; see you {today}; i am home in {span}; congratulations
app: whatsapp; messenger; instagram | telegram; signal; slack
group: family; soccer; book club; college friends; project team | neighbors; choir; chess; running; old classmates
ordinal: first; last; second | third; latest
reaction: heart; thumbs up; smile; laughing face | wave; sad face; star; clap
place: {city}; {spot}; {spot}; GET_LOCATION: {mod} {CATEGORY_LOCATION=category}; GET_LOCATION: {SEARCH_RADIUS=near}
  {CATEGORY_LOCATION=category}; GET_LOCATION_HOME: {CONTACT=owner} house
owner: {name}'s; GET_CONTACT: {CONTACT_RELATED=mine} {TYPE_RELATION=relation}'s
mod: a; the | some; any
near: the nearest; the closest | a nearby; the next
category: gas station; hospital; coffee shop; parking garage; supermarket; pharmacy; post office; train station | bakery;
  museum; police station; bookstore; car wash; drugstore; bus stop
spot: central park; the airport; union square; the science museum; oak street; the harbor; main street; the football stadium;
  lincoln high school; the old mill | river road; the city library; market square; the opera house; maple avenue; the ferry
  terminal; washington bridge; the botanical garden
vehicle: car; bus; train; foot | bike; taxi; subway
obstacle: tolls; highways; the bridge; construction | ferries; traffic; the tunnel; accidents
event: concerts; art shows; food festivals; movies; football games | plays; comedy shows; street fairs; lectures; wine
  tastings
meeting: a team lunch; the budget meeting; a video call; game night; a job interview; the yearly review; a picnic | a planning
  session; a birthday dinner; the sales meeting; movie night; a phone call; a farewell party
"""
