"""The two Lua scripts that write to Redis. Both are harmless when they run twice, late or out of order.

MERGE writes one part of a report. A source's counters are cumulative. `sources` keeps the values already merged, and
the script adds only a positive difference to `totals`. So a repeated or late call adds nothing, and after Redis lost
its newest writes the next report restores them. A ledger row is replaced only by one that knows no less. The counters
of a source wait with its row, so rows and totals always belong to the same moment.

Folded lives are cumulative too. The call that writes them removes the rows of the lives in them and moves their
counters in `sources`, so `totals` stay. A row of a life that is folded is not written again.

FLIP makes a blob of weights the current one, unless a newer version is.
"""

from __future__ import annotations

MERGE = """
-- KEYS as named below; ARGV[1]: JSON of the report (see report.py: _as_json). Returns the rows that Redis has newer
-- ones of; 'other' where the last part that Redis got is not the one that the broker thinks.
local FLEET, LEDGER, FOLDED, TOTALS, SOURCES, GAUGES, WORKERS, LEASE, GROUPS, GROUP_LEDGER, GROUP_FOLDED, INCARNATIONS,
  RUNNER_STATE, EVENTS, METRICS, METRIC_SUMS, POLICIES, ERRORS, TASKS, TASK_FIGURES, HISTORY_5S, HISTORY_60S =
  unpack(KEYS)
local report = cjson.decode(ARGV[1])

local contract = redis.call('HGET', FLEET, 'contract_version')
if contract and contract ~= report.fleet.contract_version then
  return redis.error_reply('CONTRACT this fleet is kept by contract ' .. contract .. ', not ' ..
    report.fleet.contract_version .. '; remove it with: headrace redis forget ' .. report.fleet.fleet_id)
end

if report.after ~= '' and redis.call('HGET', FLEET, 'written') ~= report.after then return 'other' end

local newer = {}

-- Sets all fields of a table at once. Lua takes some thousand arguments at most.
local function set(key, fields)
  local args = {}
  for field, value in pairs(fields) do
    args[#args + 1], args[#args + 2] = field, value
    if #args >= 1000 then
      redis.call('HSET', key, unpack(args))
      args = {}
    end
  end
  if #args > 0 then redis.call('HSET', key, unpack(args)) end
end

local function replace(key, fields)
  redis.call('DEL', key)
  set(key, fields)
end

-- What a row knows: batches cut, batches settled, steps and chunks accepted. For a closed life: the steps accepted or
-- lost, and how many are not held any more, since a dead broker's batches are lost.
local function knowledge(row)
  local measures = {row.totals.seq, row.settled.seq, row.accepted[1], row.accepted[2], 0}
  if row.closed then
    for _, count in pairs(row.lost) do
      measures[3], measures[4] = measures[3] + count[1], measures[4] + count[2]
    end
    measures[5] = -row.held[1]
  end
  return measures
end

local function knows_less(new, stored)
  local old = cjson.decode(stored)
  if new.closed and not old.closed then return false end
  if old.closed and not new.closed then return true end
  local before, now = knowledge(old), knowledge(new)
  for i = 1, 5 do if now[i] < before[i] then return true end end
  return false
end

local added, sources = {}, {}  -- written at the end

local function merge_counters(source, counters)
  local names, fields = {}, {}
  for name in pairs(counters) do
    names[#names + 1], fields[#fields + 1] = name, source .. '/' .. name
  end
  if #names == 0 then return end
  local stored = redis.call('HMGET', SOURCES, unpack(fields))
  for i, name in ipairs(names) do
    local before, value = tonumber(stored[i] or '0'), counters[name]
    if value > before then
      added[name] = (added[name] or 0) + value - before
      sources[fields[i]] = string.format('%.0f', value)
    end
  end
end

-- The first write: when Redis refuses writes (OOM, MISCONF, READONLY), it refuses here, and nothing is half done.
set(FLEET, report.fleet)
if not report.fleet.ended_unix_s then redis.call('HDEL', FLEET, 'ended_unix_s') end

if report.groups then  -- known
  for _, name in ipairs(redis.call('HKEYS', GROUPS)) do
    for _, key in ipairs(report.groups[name] and {} or {GROUP_LEDGER, GROUP_FOLDED}) do
      for _, field in ipairs(redis.call('HKEYS', key)) do
        if string.sub(field, 1, #name + 1) == name .. '/' then redis.call('HDEL', key, field) end
      end
    end
  end
  replace(GROUPS, report.groups)
end

-- A slot of a consumer group is named group/slot. Its books are in hashes of their own, and have no counters.
local function is_of_group(slot) return string.find(slot, '/', 1, true) end

-- Returns the highest folded life of a slot, the number of its folded lives, and the gaps between them.
local function lives_of(slot)
  local text = redis.call('HGET', is_of_group(slot) and GROUP_FOLDED or FOLDED, slot)
  if not text then return 0, 0, {} end
  local known = cjson.decode(text)
  local count = known.highest
  for _, gap in ipairs(known.missing) do count = count - (gap[2] - gap[1] + 1) end
  return known.highest, count, known.missing
end

-- Moves the counters of a folded life to those of all folded lives of its slot.
local function move(source, folded)
  local fields, moved = {}, {}
  for i, name in ipairs(report.counter_names) do fields[i] = source .. '/' .. name end
  if #fields > 0 then
    local values = redis.call('HMGET', SOURCES, unpack(fields))
    for i, name in ipairs(report.counter_names) do
      local value = tonumber(values[i] or '0')
      if value > 0 then
        local field = folded .. '/' .. name
        local before = tonumber(redis.call('HGET', SOURCES, field) or '0')
        moved[field] = string.format('%.0f', before + value)
      end
    end
    redis.call('HDEL', SOURCES, unpack(fields))
    set(SOURCES, moved)
  end
end

for slot, lives in pairs(report.folded) do
  local highest, count = lives_of(slot)
  local of_group = is_of_group(slot)
  if highest > lives.highest or count > lives.lives then
    newer[#newer + 1] = slot .. '/0'
  else
    for _, incarnation in ipairs(lives.rows) do
      local source = string.format('%s/%.0f', slot, incarnation)
      if not of_group then move(source, slot .. '/0') end
      redis.call('HDEL', of_group and GROUP_LEDGER or LEDGER, source)
    end
    redis.call('HSET', of_group and GROUP_FOLDED or FOLDED, slot, lives.text)
    merge_counters(slot .. '/0', lives.counters)
  end
end

local folded = {}
local function is_folded(source)
  local slot, incarnation = string.match(source, '^(.+)/(%d+)$')
  if not slot then return false end
  if not folded[slot] then folded[slot] = {lives_of(slot)} end
  local highest, missing = folded[slot][1], folded[slot][3]
  incarnation = tonumber(incarnation)
  for _, gap in ipairs(missing) do
    if gap[1] <= incarnation and incarnation <= gap[2] then return false end
  end
  return incarnation <= highest
end

local rows = {[LEDGER] = {}, [GROUP_LEDGER] = {}}
for source, text in pairs(report.rows) do
  local key = is_of_group(string.match(source, '^(.+)/')) and GROUP_LEDGER or LEDGER
  local stored = redis.call('HGET', key, source)
  if stored == text then
    report.row_counters[source] = nil  -- merged when this row was written
  elseif is_folded(source) or (stored and knows_less(cjson.decode(text), stored)) then
    report.row_counters[source] = nil
    report.counters[source] = nil
    newer[#newer + 1] = source
  else
    rows[key][source] = text
  end
end
for key, fields in pairs(rows) do set(key, fields) end
for source, counters in pairs(report.row_counters) do merge_counters(source, counters) end
for source, counters in pairs(report.counters) do
  if not is_folded(source) then merge_counters(source, counters) end
end
local sums = {}
for name, more in pairs(added) do
  sums[name] = string.format('%.0f', tonumber(redis.call('HGET', TOTALS, name) or '0') + more)
end
set(TOTALS, sums)
set(SOURCES, sources)

-- A number with six digits; a whole one as it is.
local function short(text)
  local number = tonumber(text)
  if number == math.floor(number) and math.abs(number) < 2^53 then return string.format('%.0f', number) end
  return string.format('%.6g', number)
end

-- Adds the gauges and totals of this moment to a stream, unless it has those of this interval.
local function keep(key, interval_ms, most)
  local at = math.floor(report.unix_ms / interval_ms) * interval_ms
  local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  local ahead_ms = newest and tonumber(string.match(newest[1], '^%d+')) - at
  if ahead_ms and ahead_ms >= 0 and ahead_ms < most * interval_ms then return end
  if ahead_ms and ahead_ms > 0 then redis.call('DEL', key) end  -- no time that could come soon: a clock was wrong
  local fields = {}
  for name, value in pairs(report.gauges) do
    if not string.find(name, 'unix_s$') then fields[#fields + 1], fields[#fields + 2] = name, short(value) end
  end
  local counters = redis.call('HGETALL', TOTALS)
  for i = 1, #counters, 2 do
    if not string.find(counters[i], '{module=', 1, true) then
      fields[#fields + 1], fields[#fields + 2] = counters[i], counters[i + 1]
    end
  end
  if #fields > 0 and #fields <= 1000 then
    redis.call('XADD', key, 'MAXLEN', most, string.format('%.0f-0', at), unpack(fields))
  end
end

if report.gauges then
  replace(GAUGES, report.gauges)
  replace(POLICIES, report.policies)
  keep(HISTORY_5S, unpack(report.rings[1]))
  keep(HISTORY_60S, unpack(report.rings[2]))
end
if report.clears_workers then redis.call('DEL', WORKERS) end
set(WORKERS, report.workers)
for _, slot in ipairs(report.workers_gone) do redis.call('HDEL', WORKERS, slot) end
if report.metric_sums then  -- known
  replace(METRICS, report.metrics)
  replace(METRIC_SUMS, report.metric_sums)
end
-- A fleet that is gone looks gone. One that ended in order keeps the returns and metrics of its last report.
for _, key in ipairs({GAUGES, WORKERS, POLICIES, METRICS}) do redis.call('PEXPIRE', key, report.live_ms) end
if report.fleet.ended_unix_s then
  for _, key in ipairs({POLICIES, METRICS}) do redis.call('PERSIST', key) end
end
local held = tonumber(redis.call('HGET', LEASE, 'epoch') or '0')
local epoch = tonumber(report.lease.epoch or '-1')
if epoch == held then set(LEASE, report.lease)  -- a new broker does not know yet who holds it
elseif epoch > held then replace(LEASE, report.lease) end
for slot, incarnation in pairs(report.incarnations) do
  local highest = tonumber(redis.call('HGET', INCARNATIONS, slot) or '0')
  if incarnation > highest then redis.call('HSET', INCARNATIONS, slot, string.format('%.0f', incarnation)) end
end

set(RUNNER_STATE, report.runner_state)
set(ERRORS, report.env_errors)
set(TASKS, report.tasks)
if report.task_figures then replace(TASK_FIGURES, report.task_figures) end
for _, name in ipairs(report.env_errors_gone) do redis.call('HDEL', ERRORS, name) end

local seen = 0
if redis.call('HGET', FLEET, 'event_source') == report.event_source then
  seen = tonumber(redis.call('HGET', FLEET, 'event_number') or '0')
end
for _, event in ipairs(report.events) do
  if event.number > seen then
    redis.call('XADD', EVENTS, 'MAXLEN', '~', '1000', '*', unpack(event.fields))
    seen = event.number
  end
end
redis.call('HSET', FLEET, 'event_source', report.event_source, 'event_number', string.format('%.0f', seen))
return newer
"""

CLAIM = """
-- KEYS: holder of the fleet. ARGV: who asks, milliseconds of the lease. Returns who holds it now.
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return held end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""

FLIP = """
-- KEYS: pointer, new blob, blob of the version the pointer was seen at. ARGV: epoch, seq, pointer as seen or ''.
local current = redis.call('GET', KEYS[1]) or ''
if current ~= ARGV[3] then return 'moved' end
local epoch, seq = string.match(current, '^(%d+)/(%d+)$')
if epoch and #epoch <= 15 and #seq <= 15 then
  local behind = tonumber(ARGV[1]) - tonumber(epoch)
  if behind == 0 then behind = tonumber(ARGV[2]) - tonumber(seq) end
  if behind <= 0 then return 'older' end
end
if redis.call('PERSIST', KEYS[2]) == 0 then return 'moved' end
redis.call('SET', KEYS[1], ARGV[1] .. '/' .. ARGV[2])
if KEYS[3] ~= KEYS[2] then redis.call('UNLINK', KEYS[3]) end
return 'flipped'
"""
