"""Phrasings that training never sees, written as in `task_templates.py`: the models are tested on
these."""

from __future__ import annotations

HELD_OUT = """
# alarm
IN CREATE_ALARM
could you set a {ALARM_NAME=label} alarm for {DATE_TIME=time}
get me up at {DATE_TIME=clock} {DATE_TIME=day}
i want an alarm for {DATE_TIME=time} called {ALARM_NAME=label}
put an alarm at {DATE_TIME=clock} {DATE_TIME=repeat}
IN DELETE_ALARM
please delete the alarm for {DATE_TIME=time}
cancel my alarm called {ALARM_NAME=label} {DATE_TIME=day}
erase the {ALARM_NAME=label} alarm
drop my {DATE_TIME=clock} alarm
IN GET_ALARM
do i have any alarms for {DATE_TIME=date}
show me the {ALARM_NAME=label} alarm
tell me my alarms for {DATE_TIME=time}
IN SNOOZE_ALARM
please snooze for {DATE_TIME=span}
snooze the {ALARM_NAME=label} alarm by {DATE_TIME=span}
i want to sleep {DATE_TIME=span} more
# timer
IN CREATE_TIMER
could you start a timer for {DATE_TIME=span}
set a {TIMER_NAME=dish} timer for {DATE_TIME=span}
begin a {DATE_TIME=span} countdown
put {DATE_TIME=span} on a timer for the {TIMER_NAME=dish}
IN PAUSE_TIMER
please pause the timer for the {TIMER_NAME=dish}
put the {TIMER_NAME=dish} timer on hold
pause the timer named {TIMER_NAME=dish}
IN RESUME_TIMER
please resume the timer for the {TIMER_NAME=dish}
continue with the {TIMER_NAME=dish} timer
unpause the timer named {TIMER_NAME=dish}
IN ADD_TIME_TIMER
please add {DATE_TIME=span} to my {TIMER_NAME=dish} timer
extend the timer by {DATE_TIME=span}
put another {DATE_TIME=span} on the {TIMER_NAME=dish} timer
# reminder
IN CREATE_REMINDER
please remind me to {TODO=todo} {DATE_TIME=day}
could you remind {PERSON_REMINDED=contact} to {TODO=todo} at {DATE_TIME=clock}
make a reminder to {TODO=todo} for {DATE_TIME=time}
{DATE_TIME=day} remind me to {TODO=todo}
IN DELETE_REMINDER
please delete my reminder to {TODO=todo} {DATE_TIME=day}
cancel the reminder for {DATE_TIME=time}
get rid of the reminder to {TODO=todo}
IN GET_REMINDER
show me my reminders for {DATE_TIME=date}
is there a reminder to {TODO=todo} {DATE_TIME=day}
what reminders are there for {PERSON_REMINDED=contact} {DATE_TIME=day}
IN UPDATE_REMINDER
please move my reminder to {TODO=todo} to {DATE_TIME_NEW=time}
change the {DATE_TIME=date} reminder to {DATE_TIME_NEW=date}
shift the reminder to {TODO=todo} to {DATE_TIME_NEW=clock}
# music
IN PLAY_MUSIC
could you play {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist}
i would like to hear {MUSIC_GENRE=genre} music on {MUSIC_PROVIDER_NAME=provider}
put on the playlist {MUSIC_PLAYLIST_TITLE=playlist}
play a {MUSIC_TYPE=release} by {MUSIC_ARTIST_NAME=artist} on {MUSIC_PROVIDER_NAME=provider}
IN ADD_TO_PLAYLIST_MUSIC
please add {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist} to {MUSIC_PLAYLIST_TITLE=playlist}
put this {MUSIC_TYPE=release} on my {MUSIC_PLAYLIST_TITLE=playlist} playlist
save {MUSIC_TRACK_TITLE=song} to the {MUSIC_PLAYLIST_TITLE=playlist} playlist
IN SKIP_TRACK_MUSIC
please skip the {MUSIC_TYPE=release}
skip the songs by {MUSIC_ARTIST_NAME=artist}
go to the next {MUSIC_TYPE=release}
IN LIKE_MUSIC
please like {MUSIC_TRACK_TITLE=song}
i really like this {MUSIC_GENRE=genre} {MUSIC_TYPE=release}
thumbs up for {MUSIC_TRACK_TITLE=song} by {MUSIC_ARTIST_NAME=artist}
# weather
IN GET_WEATHER
what will the weather be in {LOCATION=city} {DATE_TIME=day}
how {WEATHER_ATTRIBUTE=warm} will it be in {LOCATION=city} at {DATE_TIME=clock}
is it going to {WEATHER_ATTRIBUTE=rain} {DATE_TIME=day}
tell me the weather in {LOCATION=city} in {WEATHER_TEMPERATURE_UNIT=unit}
IN GET_SUNSET
what time does the sun set in {LOCATION=city} {DATE_TIME=day}
tell me when sunset is in {LOCATION=city}
when is sunset {DATE_TIME=day}
IN GET_SUNRISE
what time does the sun rise in {LOCATION=city} {DATE_TIME=day}
tell me when sunrise is in {LOCATION=city}
when is sunrise {DATE_TIME=day}
# messaging
IN SEND_MESSAGE
please text {RECIPIENT=contact} that {CONTENT_EXACT=news}
send {RECIPIENT=contact} a message saying {CONTENT_EXACT=news}
tell the {GROUP=group} group on {RESOURCE=app} that {CONTENT_EXACT=news}
write {RECIPIENT=contact} that {CONTENT_EXACT=news}
IN GET_MESSAGE
please read the messages from {SENDER=contact}
show me the {ORDINAL=ordinal} message in the {GROUP=group} group
are there messages from {SENDER=contact} on {RESOURCE=app}
IN REACT_MESSAGE
please react with a {TYPE_REACTION=reaction} to the message from {SENDER=contact}
give the {ORDINAL=ordinal} message in the {GROUP=group} group a {TYPE_REACTION=reaction}
react with a {TYPE_REACTION=reaction} to the text of {SENDER=contact}
# navigation
IN GET_DIRECTIONS
what is the way to {DESTINATION=place}
please give me directions to {DESTINATION=place} by {METHOD_TRAVEL=vehicle}
navigate from {SOURCE=place} to {DESTINATION=place} avoiding {OBSTRUCTION_AVOID=obstacle}
IN GET_ESTIMATED_DURATION
how long does it take from {SOURCE=place} to {DESTINATION=place}
tell me the travel time from {SOURCE=place} to {DESTINATION=place} by {METHOD_TRAVEL=vehicle}
how long is the trip to {DESTINATION=place}
IN GET_INFO_TRAFFIC
tell me about the traffic from {SOURCE=place} to {DESTINATION=place}
what is the traffic like in {LOCATION=city} {DATE_TIME=day}
is there much traffic on the way to {DESTINATION=place}
IN UPDATE_DIRECTIONS
please add a stop at {WAYPOINT=place} on the way to {DESTINATION=place}
change the route so that it avoids {OBSTRUCTION_AVOID=obstacle}
update the route with a stop at {WAYPOINT=place}
# event
IN GET_EVENT
find {CATEGORY_EVENT=event} in {LOCATION=city} {DATE_TIME=day}
what {CATEGORY_EVENT=event} are there near {LOCATION=place}
show me {CATEGORY_EVENT=event} by {NAME_EVENT=artist} in {LOCATION=city}
IN CREATE_EVENT
please schedule {NAME_EVENT=meeting} with {ATTENDEE=contact} for {DATE_TIME=time}
add {NAME_EVENT=meeting} to my calendar for {DATE_TIME=time}
invite {ATTENDEE=contact} to {NAME_EVENT=meeting} at {LOCATION=place}
"""
