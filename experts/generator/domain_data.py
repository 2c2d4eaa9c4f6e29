"""Domains of the rows, as text that is easy to extend, and the pools from which values are drawn.

A domain is a paragraph: its name, three entities (`singular/plural: field=kind ...`, a `?` marks an optional field,
the first field is the name of an entity), then links. `author WROTE/WRITTEN_BY book` is one author to many books;
a link with a noun of its own (`loan/loans: ...`) is many to many; the last link leads from an entity to its own kind.
Verbs are in the past tense, so that they fit one and many.
"""

from __future__ import annotations

SEEN_DOMAINS = """
library
author/authors: name=person country=country birth_year=year(1900,1995) award_count=int(0,14)
book/books: title=title genre=one(novel,essay,poetry,history) page_count=int(80,900) price=money(5,60) published_on=date
  in_print=bool subtitle?=title
member/members: name=person city=city joined_on=date email?=email
author WROTE/WRITTEN_BY book
member BORROWED/BORROWED_BY book loan/loans: due_on=date fine=money(0,20)
book CITED/CITED_BY book

airline
airline/airlines: name=company country=country fleet_size=int(5,400) founded_year=year(1930,2015)
flight/flights: flight_number=code destination=city distance_km=int(150,9800) ticket_price=money(40,1800)
  departure_date=date delayed=bool gate?=code
passenger/passengers: name=person nationality=country loyalty_tier=one(basic,silver,gold,platinum) miles=int(0,90000)
airline OPERATED/OPERATED_BY flight
passenger BOOKED/BOOKED_BY flight booking/bookings: seat=code booked_on=date
flight FED/FED_BY flight

clinic
doctor/doctors: name=person specialty=one(cardiology,dermatology,pediatrics,neurology) years_of_practice=int(1,40)
  city=city
appointment/appointments: reference=code reason=one(checkup,injury,vaccination,allergy) duration_minutes=int(10,90)
  fee=money(20,400) scheduled_on=date cancelled=bool note?=title
patient/patients: name=person blood_type=one(A,B,AB,O) birth_date=date weight_kg=rating(40,120) phone?=code
doctor HELD/HELD_BY appointment
patient ATTENDED/ATTENDED_BY appointment attendance/attendances: arrived_on=date waiting_minutes=int(0,80)
doctor MENTORED/MENTORED_BY doctor

games
studio/studios: name=company city=city employee_count=int(4,900) founded_year=year(1985,2022)
game/games: title=title platform=one(pc,console,mobile,handheld) rating=rating(1,10) price=money(1,80) released_on=date
  multiplayer=bool sequel_title?=title
player/players: name=person country=country level=int(1,99) email=email
studio DEVELOPED/DEVELOPED_BY game
player PLAYED/PLAYED_BY game playthrough/playthroughs: hours=int(1,300) score=int(10,9900)
game INSPIRED/INSPIRED_BY game

logistics
warehouse/warehouses: name=company city=city capacity=int(500,90000) heated=bool
shipment/shipments: tracking_code=code status=one(pending,loaded,delivered,returned) weight_kg=rating(1,900)
  freight_cost=money(10,3000) shipped_on=date fragile=bool customs_code?=code
driver/drivers: name=person license_class=one(B,C,CE,D) hired_on=date accident_count=int(0,6)
warehouse DISPATCHED/DISPATCHED_BY shipment
driver CARRIED/CARRIED_BY shipment trip/trips: distance_km=int(5,2400) fuel_cost=money(5,700)
warehouse SUPPLIED/SUPPLIED_BY warehouse

university
department/departments: name=title building=code budget=int(20000,900000) founded_year=year(1850,2010)
course/courses: title=title difficulty=one(introductory,intermediate,advanced) credits=int(1,12)
  seat_count=int(10,300) starts_on=date online=bool syllabus_link?=code
student/students: name=person major=one(physics,law,biology,economics) enrolled_on=date grade_average=rating(1,5)
department OFFERED/OFFERED_BY course
student TOOK/TAKEN_BY course enrollment/enrollments: grade=rating(1,5) attempt_count=int(1,4)
course REQUIRED/REQUIRED_BY course

restaurants
restaurant/restaurants: name=title city=city seat_count=int(12,240) star_rating=rating(1,5)
dish/dishes: name=title cuisine=one(thai,italian,mexican,ethiopian) calories=int(90,1500) price=money(4,70)
  added_on=date vegetarian=bool allergen?=one(nuts,gluten,milk)
critic/critics: name=person newspaper=company review_count=int(1,700) email?=email
restaurant SERVED/SERVED_BY dish
critic REVIEWED/REVIEWED_BY dish review/reviews: stars=int(1,5) written_on=date
critic FOLLOWED/FOLLOWED_BY critic

music
band/bands: name=title country=country formed_year=year(1960,2021) listener_count=int(100,900000)
album/albums: title=title genre=one(jazz,rock,folk,techno) track_count=int(5,24) length_minutes=rating(20,95)
  released_on=date live=bool label?=company
listener/listeners: name=person city=city birth_year=year(1950,2010) premium=bool
band RECORDED/RECORDED_BY album
listener LIKED/LIKED_BY album reaction/reactions: liked_on=date play_count=int(1,400)
band INFLUENCED/INFLUENCED_BY band

cinema
director/directors: name=person country=country award_count=int(0,20) debut_year=year(1950,2020)
film/films: title=title genre=one(drama,comedy,thriller,western) runtime_minutes=int(60,210) budget=int(90000,9000000)
  premiered_on=date restored=bool tagline?=title
actor/actors: name=person birth_date=date agency=company height_cm=int(150,205)
director DIRECTED/DIRECTED_BY film
actor PORTRAYED/PORTRAYED_BY film casting/castings: role=title salary=int(2000,900000)
film REMADE/REMADE_AS film

banking
branch/branches: name=title city=city staff_count=int(3,90) opened_on=date
account/accounts: iban=code type=one(checking,savings,business,joint) balance=money(0,9000) interest_rate=rating(0,6)
  opened_on=date frozen=bool nickname?=title
customer/customers: name=person segment=one(retail,private,student,corporate) credit_score=int(300,850) email?=email
branch MANAGED/MANAGED_BY account
customer OWNED/OWNED_BY account ownership/ownerships: share_percent=int(1,100) since=date
customer REFERRED/REFERRED_BY customer

hotels
hotel/hotels: name=title city=city star_count=int(1,5) opened_year=year(1900,2022)
room/rooms: room_number=code category=one(single,double,suite,family) floor_number=int(1,30) nightly_rate=money(35,700)
  renovated_on=date smoking=bool view?=one(sea,garden,street)
guest/guests: name=person country=country visit_count=int(1,60) vip=bool
hotel CONTAINED/CONTAINED_IN room
guest RESERVED/RESERVED_BY room reservation/reservations: arrival=date nights=int(1,21)
guest INVITED/INVITED_BY guest

farming
farm/farms: name=title region=city hectares=int(2,900) organic=bool
harvest/harvests: lot_code=code crop=one(wheat,barley,maize,lentils) tons=rating(1,300) price_per_ton=money(90,700)
  harvested_on=date certified=bool storage_silo?=code
buyer/buyers: name=company country=country credit_limit=int(1000,90000) contact_email=email
farm PRODUCED/PRODUCED_BY harvest
buyer PURCHASED/PURCHASED_BY harvest contract/contracts: signed_on=date discount=rating(0,20)
farm ADVISED/ADVISED_BY farm

zoo
zoo/zoos: name=title city=city visitor_count=int(1000,900000) founded_year=year(1860,2005)
animal/animals: name=title species=one(tiger,otter,lemur,penguin) age_years=int(1,40) weight_kg=rating(1,400)
  arrived_on=date endangered=bool chip_code?=code
keeper/keepers: name=person shift=one(morning,evening,night) experience_years=int(0,35) hired_on=date
zoo HOUSED/HOUSED_BY animal
keeper FED/FED_BY animal feeding/feedings: amount_kg=rating(1,40) fed_on=date
animal PARENTED/PARENTED_BY animal

art
artist/artists: name=person movement=one(cubism,realism,baroque,surrealism) birth_year=year(1600,1990) country=country
painting/paintings: title=title technique=one(oil,acrylic,watercolor,fresco) width_cm=int(20,400)
  insured_value=int(1000,900000) finished_on=date signed=bool inventory_code?=code
museum/museums: name=title city=city annual_visitors=int(900,900000) free_entry=bool
artist PAINTED/PAINTED_BY painting
museum EXHIBITED/EXHIBITED_BY painting exhibition/exhibitions: hall=code opened_on=date
artist TAUGHT/TAUGHT_BY artist

software
team/teams: name=title office=city headcount=int(2,60) remote=bool
ticket/tickets: summary=title priority=one(low,medium,high,urgent) story_points=int(1,21) estimate_hours=rating(1,80)
  created_on=date blocked=bool milestone?=code
developer/developers: name=person language=one(rust,python,go,kotlin) commit_count=int(1,9000) email=email
team TRACKED/TRACKED_BY ticket
developer RESOLVED/RESOLVED_BY ticket assignment/assignments: hours_spent=int(1,90) closed_on=date
ticket BLOCKED/BLOCKED_BY ticket

retail
supplier/suppliers: name=company country=country lead_days=int(1,60) preferred=bool
product/products: name=title category=one(kitchen,garden,office,toys) stock=int(0,900) unit_price=money(1,400)
  listed_on=date discontinued=bool barcode?=code
shopper/shoppers: name=person city=city lifetime_spend=money(10,9000) newsletter=bool
supplier PROVIDED/PROVIDED_BY product
shopper BOUGHT/BOUGHT_BY product purchase/purchases: quantity=int(1,20) bought_on=date
product REPLACED/REPLACED_BY product

cycling
squad/squads: name=company country=country budget=int(90000,9000000) founded_year=year(1975,2022)
rider/riders: name=person role=one(climber,sprinter,domestique,leader) age=int(18,42) weight_kg=rating(50,90)
  contract_end=date injured=bool nickname?=title
race/races: name=title region=city distance_km=int(40,290) held_on=date
squad EMPLOYED/EMPLOYED_BY rider
race FEATURED/FEATURED_IN rider entry/entries: bib_number=int(1,220) finish_minutes=rating(60,420)
rider OUTRAN/OUTRUN_BY rider

football
club/clubs: name=title city=city stadium_seats=int(900,90000) founded_year=year(1870,1995)
footballer/footballers: name=person position=one(goalkeeper,defender,midfielder,striker) goals=int(0,300)
  market_value=int(10000,9000000) signed_on=date injured=bool nickname?=title
scout/scouts: name=person region=country reports_filed=int(1,500) hired_on=date
club SIGNED/SIGNED_BY footballer
scout OBSERVED/OBSERVED_BY footballer observation/observations: observed_on=date mark=rating(1,10)
footballer ASSISTED/ASSISTED_BY footballer

energy
utility/utilities: name=company country=country customer_count=int(900,900000) state_owned=bool
power_plant/power_plants: name=title fuel=one(solar,wind,hydro,gas) capacity_mw=int(1,1800) efficiency=rating(20,95)
  commissioned_on=date grid_connected=bool permit_code?=code
inspector/inspectors: name=person district=city license_code=code inspection_count=int(1,400)
utility BUILT/BUILT_BY power_plant
inspector AUDITED/AUDITED_BY power_plant audit/audits: findings=int(0,40) audited_on=date
power_plant BACKED/BACKED_BY power_plant

real_estate
agency/agencies: name=company city=city agent_count=int(1,90) commission=rating(1,8)
apartment/apartments: address_code=code heating=one(gas,electric,district,none) area_sqm=int(18,260)
  monthly_rent=money(300,4000) available_from=date furnished=bool parking_spot?=code
tenant/tenants: name=person occupation=one(nurse,teacher,engineer,student) income=int(900,9000) email?=email
agency LISTED/LISTED_BY apartment
tenant RENTED/RENTED_BY apartment lease/leases: starts_on=date deposit=money(300,6000)
tenant RECOMMENDED/RECOMMENDED_BY tenant

space
space_agency/space_agencies: name=company country=country budget=int(90000,9000000) founded_year=year(1955,2018)
mission/missions: name=title target=one(moon,mars,venus,asteroid) crew_size=int(0,8) duration_days=int(1,900)
  launched_on=date crewed=bool failure_reason?=title
astronaut/astronauts: name=person nationality=country flight_hours=int(50,9000) retired=bool
space_agency LAUNCHED/LAUNCHED_BY mission
astronaut JOINED/JOINED_BY mission crew_seat/crew_seats: rank=one(commander,pilot,engineer) spacewalks=int(0,9)
mission PRECEDED/PRECEDED_BY mission

news
newspaper/newspapers: name=title city=city circulation=int(900,900000) daily=bool
article/articles: headline=title section=one(politics,sports,culture,science) word_count=int(120,4000)
  reading_minutes=rating(1,30) published_on=date paywalled=bool correction?=title
reader/readers: name=person country=country subscription=one(trial,digital,print) joined_on=date
newspaper PRINTED/PRINTED_BY article
reader BOOKMARKED/BOOKMARKED_BY article bookmark/bookmarks: saved_on=date folder=title
article QUOTED/QUOTED_BY article

law
law_firm/law_firms: name=company city=city partner_count=int(1,120) founded_year=year(1880,2020)
lawsuit/lawsuits: docket_code=code area=one(labor,patent,family,tax) claim_amount=int(900,900000)
  hearing_count=int(1,30) filed_on=date settled=bool appeal_code?=code
judge/judges: name=person court=city years_on_bench=int(1,40) appointed_on=date
law_firm ARGUED/ARGUED_BY lawsuit
judge DECIDED/DECIDED_BY lawsuit ruling/rulings: ruled_on=date page_count=int(2,240)
lawsuit OVERTURNED/OVERTURNED_BY lawsuit

insurance
insurer/insurers: name=company country=country solvency_ratio=rating(100,300) founded_year=year(1840,2015)
policy/policies: policy_code=code coverage=one(car,home,travel,health) premium=money(20,900)
  deductible=int(0,3000) valid_until=date cancelled=bool discount_code?=code
holder/holders: name=person city=city risk_class=one(low,medium,high) claim_count=int(0,15)
insurer ISSUED/ISSUED_BY policy
holder SUBSCRIBED/SUBSCRIBED_BY policy subscription/subscriptions: started_on=date monthly_fee=money(5,300)
holder WITNESSED/WITNESSED_FOR holder

shipping
harbor/harbors: name=title country=country berth_count=int(2,90) depth_m=rating(4,30)
vessel/vessels: name=title hull=one(tanker,ferry,trawler,container) tonnage=int(90,90000) top_speed=rating(8,40)
  built_on=date insured=bool flag?=country
captain/captains: name=person rank=one(junior,senior,master) sea_years=int(1,45) licensed_on=date
harbor HOSTED/HOSTED_BY vessel
captain COMMANDED/COMMANDED_BY vessel voyage/voyages: miles=int(10,9000) left_on=date
vessel TOWED/TOWED_BY vessel

podcasts
host/hosts: name=person city=city follower_count=int(10,900000) debut_year=year(2005,2024)
episode/episodes: title=title topic=one(history,cooking,finance,crime) length_minutes=int(8,180) rating=rating(1,5)
  aired_on=date explicit=bool sponsor?=company
fan/fans: name=person country=country age=int(14,80) email?=email
host PRESENTED/PRESENTED_BY episode
fan STREAMED/STREAMED_BY episode stream/streams: minutes=int(1,180) streamed_on=date
host INTERVIEWED/INTERVIEWED_BY host

pharmacy
drug_maker/drug_makers: name=company country=country plant_count=int(1,40) revenue=int(90000,9000000)
drug/drugs: name=title form=one(tablet,syrup,ointment,spray) dose_mg=int(1,900) price=money(2,300)
  approved_on=date prescription_only=bool warning?=title
pharmacist/pharmacists: name=person city=city license_code=code experience_years=int(0,40)
drug_maker PATENTED/PATENTED_BY drug
pharmacist DISPENSED/DISPENSED_BY drug dispensation/dispensations: packs=int(1,12) dispensed_on=date
drug INTENSIFIED/INTENSIFIED_BY drug

schools
school/schools: name=title district=city pupil_count=int(60,2400) boarding=bool
lesson/lessons: title=title subject=one(maths,music,geography,chemistry) grade=int(1,12) minutes=int(20,120)
  taught_on=date outdoor=bool homework?=title
pupil/pupils: name=person birth_date=date house=one(red,blue,green,yellow) absence_days=int(0,40)
school PLANNED/PLANNED_BY lesson
pupil VISITED/VISITED_BY lesson visit/visits: mark=rating(1,6) late_minutes=int(0,45)
pupil TUTORED/TUTORED_BY pupil
"""

# Only in the test split: answers about these domains must be read from the schema, not memorized.
UNSEEN_DOMAINS = """
brewing
brewery/breweries: name=company town=city tank_count=int(1,60) founded_year=year(1600,2020)
beer/beers: name=title style=one(lager,stout,porter,saison) bitterness=int(5,110) alcohol=rating(0,12)
  brewed_on=date barrel_aged=bool hop_variety?=title
taster/tasters: name=person country=country palate_score=int(1,100) certified=bool
brewery BREWED/BREWED_BY beer
taster SAMPLED/SAMPLED_BY beer tasting/tastings: points=int(1,100) tasted_on=date
beer SUCCEEDED/SUCCEEDED_BY beer

railways
railway/railways: name=company country=country track_km=int(40,9000) electrified=bool
locomotive/locomotives: serial_code=code traction=one(steam,diesel,electric,hybrid) horsepower=int(200,9000)
  axle_load=rating(8,30) delivered_on=date retired=bool livery?=title
conductor/conductors: name=person depot=city seniority_years=int(0,40) hired_on=date
railway ACQUIRED/ACQUIRED_BY locomotive
conductor DROVE/DRIVEN_BY locomotive duty/duties: started_on=date kilometers=int(5,900)
locomotive PUSHED/PUSHED_BY locomotive

geology
observatory/observatories: name=title country=country sensor_count=int(1,300) altitude_m=int(10,5200)
volcano/volcanoes: name=title shape=one(shield,caldera,cone,dome) elevation_m=int(200,6800) alert_index=rating(0,5)
  last_eruption=date dormant=bool local_name?=title
geologist/geologists: name=person institute=company paper_count=int(1,300) field_days=int(1,900)
observatory MONITORED/MONITORED_BY volcano
geologist SURVEYED/SURVEYED_BY volcano survey/surveys: surveyed_on=date sample_count=int(1,90)
volcano TRIGGERED/TRIGGERED_BY volcano

theatre
playhouse/playhouses: name=title city=city balcony_seats=int(20,900) subsidized=bool
drama/dramas: title=title mood=one(tragic,comic,absurd,romantic) act_count=int(1,7) running_minutes=int(40,260)
  opened_on=date censored=bool translator?=person
patron/patrons: name=person profession=one(baker,lawyer,pilot,florist) donation_total=money(10,9000) joined_on=date
playhouse STAGED/STAGED_BY drama
patron FUNDED/FUNDED_BY drama grant/grants: amount=money(50,9000) paid_on=date
drama PARODIED/PARODIED_BY drama

fitness
gym/gyms: name=company city=city locker_count=int(20,500) pool=bool
workout/workouts: name=title intensity=one(gentle,moderate,hard,extreme) burned_kcal=int(50,1200)
  duration_minutes=int(10,120) created_on=date equipment_needed=bool playlist?=title
athlete/athletes: name=person discipline=one(rowing,boxing,judo,fencing) resting_pulse=int(38,90) birth_date=date
gym SCHEDULED/SCHEDULED_BY workout
athlete COMPLETED/COMPLETED_BY workout completion/completions: peak_pulse=int(90,200) completed_on=date
athlete COACHED/COACHED_BY athlete

parks
park/parks: name=title region=country area_sqkm=int(3,9000) entry_fee=money(0,40)
footpath/footpaths: name=title surface=one(gravel,rock,sand,boardwalk) length_km=rating(1,60) ascent_m=int(0,2400)
  surveyed_on=date closed=bool shelter?=title
ranger/rangers: name=person badge_code=code rescue_count=int(0,90) sworn_in_on=date
park MAINTAINED/MAINTAINED_BY footpath
ranger PATROLLED/PATROLLED_BY footpath patrol/patrols: walked_on=date incidents=int(0,12)
footpath CROSSED/CROSSED_BY footpath

charity
charity/charities: name=company country=country volunteer_count=int(3,9000) registered_year=year(1900,2023)
campaign/campaigns: slogan=title cause=one(water,housing,literacy,rescue) goal_amount=int(500,900000)
  raised_percent=rating(0,140) ends_on=date matched=bool ambassador?=person
donor/donors: name=person city=city gift_count=int(1,90) anonymous=bool
charity STARTED/STARTED_BY campaign
donor SUPPORTED/SUPPORTED_BY campaign pledge/pledges: pledged_sum=money(5,3000) pledged_on=date
donor PERSUADED/PERSUADED_BY donor

telecom
carrier/carriers: name=company country=country tower_count=int(20,90000) roaming=bool
phone_plan/phone_plans: name=title network=one(lte,fiber,satellite,cable) data_gb=int(1,900) monthly_cost=money(3,120)
  launched_on=date prepaid=bool bonus?=title
caller/callers: name=person city=city contract_months=int(1,48) birth_date=date
carrier MARKETED/MARKETED_BY phone_plan
caller CHOSE/CHOSEN_BY phone_plan activation/activations: activated_on=date discount_percent=int(0,50)
phone_plan OUTSOLD/OUTSOLD_BY phone_plan
"""


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _split_commas(words: str) -> tuple[str, ...]:
    return tuple(words.split(","))


FIRST_NAMES = _split(
    "Ada Amir Ana Anton Aria Ben Bruno Carla Chen Clara Dana David Diego Elena Emil Emma Farid Fatima Felix Grace "
    "Hana Hugo Ines Ivan Jana Jonas José Julia Kaito Karin Lena Leo Lina Louis Łukasz Maja Marta Milo Mira Nadia "
    "Nils Nina Noor Omar Oskar Paula Pavel Priya Rafael Rosa Samir Sara Sofia Tarek Tessa Tomas Uma Vera Victor "
    "Wanda Yara Yusuf Zoë Zora"
)
LAST_NAMES = _split(
    "Abbott Adeyemi Almeida Baker Bauer Becker Bianchi Brandt Campos Carter Chavez Cohen Costa Dahl Dubois Eriksen "
    "Farouk Fischer Fontaine Garcia Gupta Haddad Hansen Hoffman Horvat Ibrahim Ito Jansen Kaya Kim Kovacs Lambert "
    "Larsen Lopez Marino Mendes Meyer Mori Müller Nakamura Novak O'Brien O'Neill Okafor Olsen Ortiz Park Patel "
    "Petrov Popescu Reyes Rossi Sato Schmidt Silva Singh Sokolov Suzuki Tanaka Torres Vargas Walker Weber Zhang"
)
CITIES = _split_commas(
    "Accra,Antwerp,Athens,Baku,Bergen,Bilbao,Bogota,Boston,Cairo,Cork,Dakar,Denver,Dublin,Essen,Geneva,Ghent,Graz,"
    "Hanoi,Havana,Izmir,Jaipur,Kyoto,Lagos,Leeds,Lima,Lyon,Malmo,Manila,Miami,Milan,Nairobi,Naples,New Haven,Odense,"
    "Osaka,Oslo,Perth,Porto,Prague,Quito,Riga,San Juan,Seoul,Split,Tallinn,Tampa,Toronto,Tunis,Turin,Vienna,Zagreb"
)
COUNTRIES = _split_commas(
    "Argentina,Austria,Belgium,Brazil,Canada,Chile,Croatia,Denmark,Egypt,Estonia,Finland,France,Germany,Ghana,Greece,"
    "Iceland,India,Ireland,Italy,Japan,Kenya,Latvia,Mexico,Morocco,Nepal,New Zealand,Norway,Peru,Poland,Portugal,"
    "Senegal,Slovenia,South Korea,Spain,Sweden,Turkey,Uruguay,Vietnam"
)
ADJECTIVES = _split(
    "Amber Ancient Blue Bold Brave Bright Broken Calm Clever Copper Crimson Crooked Distant Eager Electric Empty "
    "Endless Fading Frozen Gentle Gilded Golden Green Hidden Hollow Humble Iron Ivory Lonely Loud Lucky Marble "
    "Midnight Misty Narrow Northern Pale Patient Quiet Rapid Restless Rising Royal Rusty Sacred Salty Scarlet Secret "
    "Silent Silver Simple Slow Southern Stormy Sunny Twisted Velvet Wandering Wild Winter"
)
NOUNS = _split(
    "Anchor Arrow Badger Beacon Bell Bridge Canyon Castle Cedar Circle Comet Compass Coral Crane Crown Dawn Desert "
    "Dragon Eagle Ember Falcon Feather Fern Field Forest Fountain Fox Garden Glacier Harbor Heron Horizon Island "
    "Jungle Kite Lantern Lark Lighthouse Maple Meadow Mirror Moon Mountain Ocean Orchard Otter Owl Palace Pearl "
    "Pioneer Prairie Raven Ridge River Rocket Shadow Sparrow Spring Summit Temple Thunder Tiger Tower Valley Willow"
)
COMPANY_ENDINGS = _split("Group Labs Partners Works Industries Holdings Collective Trading Systems Union")
MONTHS = _split("January February March April May June July August September October November December")
