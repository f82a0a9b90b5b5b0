"""What the task's utterances look like in training: for each intent its phrasings.
`task_held_out.py` has others.

`{SLOT=class}` is a slot filled from a class of `task_entities.py`, `{class}` words that mean
nothing for the structure. The intents, slots and their nesting follow TOPv2's (alarm, timer,
reminder, music, weather, messaging, navigation, event); all phrasings are our own. Knows no model
and draws nothing.
"""

from __future__ import annotations

TEMPLATES = """
# alarm
IN CREATE_ALARM
set an alarm for {DATE_TIME=time}
set an alarm called {ALARM_NAME=label} for {DATE_TIME=time}
wake me up at {DATE_TIME=clock} {DATE_TIME=day}
i need an alarm {DATE_TIME=day} at {DATE_TIME=clock} for {ALARM_NAME=label}
create a {ALARM_NAME=label} alarm at {DATE_TIME=clock}
add an alarm for {DATE_TIME=time} named {ALARM_NAME=label}
make sure an alarm rings at {DATE_TIME=clock}
new alarm for {DATE_TIME=clock} {DATE_TIME=repeat}
alarm at {DATE_TIME=clock} for my {ALARM_NAME=label}
ring me at {DATE_TIME=clock} for the {ALARM_NAME=label}
have an alarm ready {DATE_TIME=day} around {DATE_TIME=clock}
{DATE_TIME=repeat} i want the {ALARM_NAME=label} alarm at {DATE_TIME=clock}
IN DELETE_ALARM
delete my {DATE_TIME=clock} alarm
cancel the {ALARM_NAME=label} alarm
remove the alarm named {ALARM_NAME=label} for {DATE_TIME=date}
turn off my alarm for {DATE_TIME=time}
get rid of the {ALARM_NAME=label} alarm at {DATE_TIME=clock}
i do not need the alarm for {DATE_TIME=time} any more
kill the alarm that i named {ALARM_NAME=label}
there should be no {ALARM_NAME=label} alarm {DATE_TIME=day}
stop the {DATE_TIME=clock} alarm from ringing
the {ALARM_NAME=label} alarm can go
IN GET_ALARM
what alarms do i have for {DATE_TIME=date}
show my alarms for {DATE_TIME=date}
when is my {ALARM_NAME=label} alarm
is there an alarm set for {DATE_TIME=time}
which alarms are on {DATE_TIME=date}
list the {ALARM_NAME=label} alarms
do any alarms ring {DATE_TIME=day}
at what time is the {ALARM_NAME=label} alarm
give me all alarms for {DATE_TIME=time}
IN SNOOZE_ALARM
snooze the alarm for {DATE_TIME=span}
snooze my {ALARM_NAME=label} alarm for {DATE_TIME=span}
let me sleep {DATE_TIME=span} longer
give the {ALARM_NAME=label} alarm another {DATE_TIME=span}
hit snooze for {DATE_TIME=span}
{DATE_TIME=span} more sleep
leave the {ALARM_NAME=label} alarm quiet for {DATE_TIME=span}
put off the alarm by {DATE_TIME=span}
delay my {ALARM_NAME=label} alarm {DATE_TIME=span}
# timer
IN CREATE_TIMER
set a timer for {DATE_TIME=span}
start a {DATE_TIME=span} timer
start a timer of {DATE_TIME=span} for the {TIMER_NAME=dish}
i need a {TIMER_NAME=dish} timer for {DATE_TIME=span}
count down {DATE_TIME=span}
time the {TIMER_NAME=dish} for {DATE_TIME=span}
create a timer named {TIMER_NAME=dish} for {DATE_TIME=span}
{DATE_TIME=span} for the {TIMER_NAME=dish} starting now
run a {TIMER_NAME=dish} timer of {DATE_TIME=span}
tell me when {DATE_TIME=span} are over
watch the {TIMER_NAME=dish} for {DATE_TIME=span}
IN PAUSE_TIMER
pause the {TIMER_NAME=dish} timer
hold the timer for the {TIMER_NAME=dish}
stop the {TIMER_NAME=dish} timer for now
pause my timer for the {TIMER_NAME=dish} please
freeze the {TIMER_NAME=dish} timer
make the {TIMER_NAME=dish} timer wait
the timer of the {TIMER_NAME=dish} should pause
hold on with the {TIMER_NAME=dish}
IN RESUME_TIMER
resume the {TIMER_NAME=dish} timer
continue the timer for the {TIMER_NAME=dish}
let the {TIMER_NAME=dish} timer run again
unpause the {TIMER_NAME=dish} timer
restart the paused {TIMER_NAME=dish} timer
go on with the timer of the {TIMER_NAME=dish}
the {TIMER_NAME=dish} timer should keep going
start the {TIMER_NAME=dish} timer where it was
IN ADD_TIME_TIMER
add {DATE_TIME=span} to the timer
add {DATE_TIME=span} to the {TIMER_NAME=dish} timer
give the {TIMER_NAME=dish} timer {DATE_TIME=span} more
extend the {TIMER_NAME=dish} timer by {DATE_TIME=span}
make the timer {DATE_TIME=span} longer
{DATE_TIME=span} extra for the {TIMER_NAME=dish}
the {TIMER_NAME=dish} timer needs {DATE_TIME=span} more
let the {TIMER_NAME=dish} timer run {DATE_TIME=span} longer
# reminder
IN CREATE_REMINDER
remind me to {TODO=todo} {DATE_TIME=day}
remind me to {TODO=todo} at {DATE_TIME=clock}
remind {PERSON_REMINDED=contact} to {TODO=todo} {DATE_TIME=day}
set a reminder to {TODO=todo} for {DATE_TIME=time}
add a reminder for {PERSON_REMINDED=contact} to {TODO=todo} at {DATE_TIME=clock}
i have to {TODO=todo} {DATE_TIME=day} so remind me
at {DATE_TIME=clock} remind me to {TODO=todo}
create a reminder to {TODO=todo} {DATE_TIME=repeat}
do not let me forget to {TODO=todo} {DATE_TIME=day}
{DATE_TIME=repeat} i have to {TODO=todo} so remind me
note that {PERSON_REMINDED=contact} must {TODO=todo} {DATE_TIME=day}
reminder for {DATE_TIME=time} to {TODO=todo}
IN DELETE_REMINDER
delete the reminder to {TODO=todo}
cancel my reminder to {TODO=todo} {DATE_TIME=day}
remove all reminders for {DATE_TIME=date}
forget the reminder to {TODO=todo}
i no longer need the reminder to {TODO=todo} at {DATE_TIME=clock}
scrap the reminder for {DATE_TIME=time}
never mind the reminder to {TODO=todo}
i did {TODO=todo} so drop that reminder
take the reminder to {TODO=todo} off {DATE_TIME=date}
IN GET_REMINDER
what are my reminders for {DATE_TIME=date}
show the reminder to {TODO=todo}
do i have a reminder to {TODO=todo} {DATE_TIME=day}
list all reminders for {DATE_TIME=date}
which reminders does {PERSON_REMINDED=contact} have for {DATE_TIME=date}
did i ask to be reminded to {TODO=todo}
what must {PERSON_REMINDED=contact} remember {DATE_TIME=day}
read all reminders of {DATE_TIME=date} to me
IN UPDATE_REMINDER
move the reminder to {TODO=todo} to {DATE_TIME_NEW=time}
change my reminder to {TODO=todo} to {DATE_TIME_NEW=clock}
push the reminder to {TODO=todo} from {DATE_TIME=date} to {DATE_TIME_NEW=date}
update the {DATE_TIME=clock} reminder to {DATE_TIME_NEW=clock}
reschedule the reminder to {TODO=todo} for {DATE_TIME_NEW=time}
make it {DATE_TIME_NEW=time} for the reminder to {TODO=todo}
not {DATE_TIME=date} but {DATE_TIME_NEW=date} for the reminder to {TODO=todo}
let the {DATE_TIME=date} reminder come {DATE_TIME_NEW=day}
# music
IN PLAY_MUSIC
play {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist}
play some {MUSIC_GENRE=genre} music
i want to hear {MUSIC_TRACK_TITLE=song}
put on {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist} on {MUSIC_PROVIDER_NAME=provider}
play the newest {MUSIC_TYPE=release} by {MUSIC_ARTIST_NAME=artist}
play my {MUSIC_PLAYLIST_TITLE=playlist} playlist on {MUSIC_PROVIDER_NAME=provider}
start the {MUSIC_PLAYLIST_TITLE=playlist} playlist
let me listen to {MUSIC_GENRE=genre} songs by {MUSIC_ARTIST_NAME=artist}
some {MUSIC_GENRE=genre} from {MUSIC_PROVIDER_NAME=provider} would be nice
give me the {MUSIC_TYPE=release} of {MUSIC_ARTIST_NAME=artist}
how about {MUSIC_TRACK_TITLE=song} from {MUSIC_ARTIST_NAME=artist}
open {MUSIC_PROVIDER_NAME=provider} and run the {MUSIC_PLAYLIST_TITLE=playlist} playlist
IN ADD_TO_PLAYLIST_MUSIC
add {MUSIC_TRACK_TITLE=song} to my {MUSIC_PLAYLIST_TITLE=playlist} playlist
put {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist} on the {MUSIC_PLAYLIST_TITLE=playlist} playlist
add this {MUSIC_TYPE=release} to the {MUSIC_PLAYLIST_TITLE=playlist} playlist
save {MUSIC_TRACK_TITLE=song} to {MUSIC_PLAYLIST_TITLE=playlist}
add the {MUSIC_TYPE=release} by {MUSIC_ARTIST_NAME=artist} to {MUSIC_PLAYLIST_TITLE=playlist}
{MUSIC_PLAYLIST_TITLE=playlist} should have {MUSIC_TRACK_TITLE=song} on it
let {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist} join {MUSIC_PLAYLIST_TITLE=playlist}
keep this {MUSIC_TYPE=release} in {MUSIC_PLAYLIST_TITLE=playlist}
IN SKIP_TRACK_MUSIC
skip this {MUSIC_TYPE=release}
skip to the next {MUSIC_GENRE=genre} song
next {MUSIC_TYPE=release} please
i do not want to hear this {MUSIC_TYPE=release} skip it
skip everything by {MUSIC_ARTIST_NAME=artist}
no more of {MUSIC_ARTIST_NAME=artist}
jump over this {MUSIC_TYPE=release}
i am tired of {MUSIC_ARTIST_NAME=artist} skip that
leave out the {MUSIC_GENRE=genre} {MUSIC_TYPE=release}
IN LIKE_MUSIC
i like this {MUSIC_TYPE=release}
like {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist}
give {MUSIC_TRACK_TITLE=song} a thumbs up
mark this {MUSIC_GENRE=genre} {MUSIC_TYPE=release} as a favorite
i love {MUSIC_TRACK_TITLE=song} remember that
{MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist} is great
what a {MUSIC_GENRE=genre} {MUSIC_TYPE=release} i like it
put {MUSIC_TRACK_TITLE=song} among my favorites
# weather
IN GET_WEATHER
what is the weather in {LOCATION=city} {DATE_TIME=day}
will it {WEATHER_ATTRIBUTE=rain} in {LOCATION=city} {DATE_TIME=day}
how {WEATHER_ATTRIBUTE=warm} is it going to be {DATE_TIME=day}
weather for {LOCATION=city} at {DATE_TIME=clock}
is it {WEATHER_ATTRIBUTE=warm} in {LOCATION=city}
do i need an umbrella in {LOCATION=city} {DATE_TIME=day}
temperature in {LOCATION=city} in {WEATHER_TEMPERATURE_UNIT=unit} {DATE_TIME=day}
{LOCATION=city} weather {DATE_TIME=day}
is {DATE_TIME=date} going to be {WEATHER_ATTRIBUTE=warm} in {LOCATION=city}
how many degrees {WEATHER_TEMPERATURE_UNIT=unit} does {LOCATION=city} have
does it {WEATHER_ATTRIBUTE=rain} at {DATE_TIME=clock} in {LOCATION=city}
IN GET_SUNSET
when does the sun set in {LOCATION=city}
what time is sunset {DATE_TIME=day}
sunset in {LOCATION=city} {DATE_TIME=day}
when will it get dark in {LOCATION=city} {DATE_TIME=day}
until when do we have light in {LOCATION=city}
{DATE_TIME=day} when is the sun gone in {LOCATION=city}
at what hour does {LOCATION=city} see the sunset
IN GET_SUNRISE
when does the sun rise in {LOCATION=city}
what time is sunrise {DATE_TIME=day}
sunrise in {LOCATION=city} {DATE_TIME=day}
when will it get light in {LOCATION=city} {DATE_TIME=day}
from when do we have light in {LOCATION=city}
{DATE_TIME=day} when is the sun up in {LOCATION=city}
at what hour does {LOCATION=city} see the sunrise
# messaging
IN SEND_MESSAGE
tell {RECIPIENT=contact} that {CONTENT_EXACT=news}
text {RECIPIENT=contact} that {CONTENT_EXACT=news}
send a message to {RECIPIENT=contact} saying {CONTENT_EXACT=news}
let {RECIPIENT=contact} know that {CONTENT_EXACT=news}
message {RECIPIENT=contact} on {RESOURCE=app} that {CONTENT_EXACT=news}
write to the {GROUP=group} group that {CONTENT_EXACT=news}
send {RECIPIENT=contact} a text at {DATE_TIME=clock} that says {CONTENT_EXACT=news}
{RECIPIENT=contact} should know that {CONTENT_EXACT=news}
say to {RECIPIENT=contact} on {RESOURCE=app} that {CONTENT_EXACT=news}
post in {GROUP=group} that {CONTENT_EXACT=news}
inform {RECIPIENT=contact} {DATE_TIME=day} that {CONTENT_EXACT=news}
IN GET_MESSAGE
show my messages from {SENDER=contact}
did {SENDER=contact} write to me on {RESOURCE=app}
read the {ORDINAL=ordinal} message from {SENDER=contact}
do i have messages in the {GROUP=group} group
read the messages that {SENDER=contact} sent {DATE_TIME=day}
what did {SENDER=contact} write {DATE_TIME=day}
open the {ORDINAL=ordinal} message of {SENDER=contact}
anything new from {SENDER=contact} in {RESOURCE=app}
what was the {ORDINAL=ordinal} thing said in the {GROUP=group} group
IN REACT_MESSAGE
react to the message from {SENDER=contact} with a {TYPE_REACTION=reaction}
put a {TYPE_REACTION=reaction} on the {ORDINAL=ordinal} message from {SENDER=contact}
send a {TYPE_REACTION=reaction} to the {GROUP=group} group
answer the text of {SENDER=contact} with a {TYPE_REACTION=reaction}
a {TYPE_REACTION=reaction} for what {SENDER=contact} wrote
let {SENDER=contact} have a {TYPE_REACTION=reaction} for the {ORDINAL=ordinal} message
reply to the {GROUP=group} group with a {TYPE_REACTION=reaction}
# navigation
IN GET_DIRECTIONS
how do i get to {DESTINATION=place}
directions from {SOURCE=place} to {DESTINATION=place}
take me to {DESTINATION=place} by {METHOD_TRAVEL=vehicle}
give me directions to {DESTINATION=place} avoiding {OBSTRUCTION_AVOID=obstacle}
navigate to {DESTINATION=place}
show the way from {SOURCE=place} to {DESTINATION=place} by {METHOD_TRAVEL=vehicle}
lead me from {SOURCE=place} to {DESTINATION=place}
i am at {SOURCE=place} and want to go to {DESTINATION=place}
which way to {DESTINATION=place} without {OBSTRUCTION_AVOID=obstacle}
by {METHOD_TRAVEL=vehicle} to {DESTINATION=place}
IN GET_ESTIMATED_DURATION
how long does it take to {DESTINATION=place} by {METHOD_TRAVEL=vehicle}
how long is the drive from {SOURCE=place} to {DESTINATION=place}
how many minutes to {DESTINATION=place} from {SOURCE=place}
what is the travel time to {DESTINATION=place}
how long would i need by {METHOD_TRAVEL=vehicle} to {DESTINATION=place}
when will i reach {DESTINATION=place} by {METHOD_TRAVEL=vehicle}
from {SOURCE=place} to {DESTINATION=place} takes how long
is {DESTINATION=place} far from {SOURCE=place} by {METHOD_TRAVEL=vehicle}
IN GET_INFO_TRAFFIC
how is the traffic to {DESTINATION=place}
what is traffic like from {SOURCE=place} to {DESTINATION=place}
is there traffic near {LOCATION=place} {DATE_TIME=day}
traffic report for {LOCATION=city} at {DATE_TIME=clock}
are there delays on the way to {DESTINATION=place}
is the road to {DESTINATION=place} full {DATE_TIME=day}
how bad is it on the streets of {LOCATION=city}
any jams from {SOURCE=place} to {DESTINATION=place}
IN UPDATE_DIRECTIONS
change the route to avoid {OBSTRUCTION_AVOID=obstacle}
add a stop at {WAYPOINT=place}
go past {WAYPOINT=place} on the way to {DESTINATION=place}
find a route to {DESTINATION=place} without {OBSTRUCTION_AVOID=obstacle}
stop at {WAYPOINT=place} first
i want to avoid {OBSTRUCTION_AVOID=obstacle} so change the route
lead me around {OBSTRUCTION_AVOID=obstacle}
take {WAYPOINT=place} into the route to {DESTINATION=place}
with a break at {WAYPOINT=place}
# event
IN GET_EVENT
what {CATEGORY_EVENT=event} are in {LOCATION=city} {DATE_TIME=day}
find {CATEGORY_EVENT=event} near {LOCATION=place}
are there any {CATEGORY_EVENT=event} by {NAME_EVENT=artist} {DATE_TIME=day}
things to do in {LOCATION=city} {DATE_TIME=day}
show {CATEGORY_EVENT=event} in {LOCATION=city}
does {LOCATION=city} have {CATEGORY_EVENT=event} {DATE_TIME=day}
where can i see {CATEGORY_EVENT=event} with {NAME_EVENT=artist}
i am looking for {CATEGORY_EVENT=event} close to {LOCATION=place}
IN CREATE_EVENT
invite {ATTENDEE=contact} to {NAME_EVENT=meeting} {DATE_TIME=day}
schedule {NAME_EVENT=meeting} with {ATTENDEE=contact} at {DATE_TIME=clock}
put {NAME_EVENT=meeting} in my calendar for {DATE_TIME=time}
plan {NAME_EVENT=meeting} at {LOCATION=place} {DATE_TIME=day}
book {NAME_EVENT=meeting} with {ATTENDEE=contact} in {LOCATION=city} {DATE_TIME=day}
{DATE_TIME=day} there is {NAME_EVENT=meeting} with {ATTENDEE=contact}
make an appointment for {NAME_EVENT=meeting} at {DATE_TIME=clock}
{ATTENDEE=contact} comes to {NAME_EVENT=meeting} in {LOCATION=city} so note it
"""
