"""The two Lua scripts that write to Redis. Both are harmless when they run twice, late or out of order.

MERGE writes one report. A source's counters are cumulative. `sources` keeps the values already merged, and the script
adds only a positive difference to `totals`. So a repeated or late call adds nothing, and after Redis lost its newest
writes the next report restores them. A ledger row is replaced only by one that knows no less. The counters of a source
wait with its row, so rows and totals always belong to the same moment.

FLIP makes a blob of weights the current one, unless a newer version is.
"""

from __future__ import annotations

MERGE = """
-- KEYS as named below; ARGV[1]: JSON of the report (see report.py: _as_json). Returns the counters it had to skip.
local FLEET, LEDGER, TOTALS, SOURCES, GAUGES, WORKERS, LEASE, INCARNATIONS, RUNNER_STATE, EVENTS, METRICS, METRIC_SUMS,
  POLICIES = unpack(KEYS)
local report = cjson.decode(ARGV[1])
local skipped = {}

local function replace(key, fields)
  redis.call('DEL', key)
  for field, value in pairs(fields) do redis.call('HSET', key, field, value) end
end

-- What a row knows: batches cut, batches settled, steps and chunks accepted; nil for a value that is no row. For a
-- closed life: the steps accepted or lost, and how many are not held any more, since a dead broker's batches are lost.
local function knowledge(row)
  if type(row) ~= 'table' or type(row.totals) ~= 'table' or type(row.settled) ~= 'table'
      or type(row.accepted) ~= 'table' then return nil end
  local measures = {row.totals.seq, row.settled.seq, row.accepted[1], row.accepted[2], 0}
  for i = 1, 4 do if type(measures[i]) ~= 'number' then return nil end end
  if row.closed and type(row.lost) == 'table' and type(row.held) == 'table' then
    for _, count in pairs(row.lost) do
      measures[3], measures[4] = measures[3] + count[1], measures[4] + count[2]
    end
    measures[5] = -row.held[1]
  end
  return measures
end

local function knows_less(new, stored)
  local ok, old = pcall(cjson.decode, stored)
  local before = ok and knowledge(old)
  if not before or (new.closed and not old.closed) then return false end
  if old.closed and not new.closed then return true end
  local now = knowledge(new)
  for i = 1, 5 do if now[i] < before[i] then return true end end
  return false
end

local function merge_counters(source, counters)
  for name, value in pairs(counters) do
    local field = source .. '/' .. name
    local before = tonumber(redis.call('HGET', SOURCES, field) or '0')
    local total = redis.call('HGET', TOTALS, name) or '0'
    if not before or not string.match(total, '^%d+$') then
      skipped[#skipped + 1] = field
    elseif value > before then
      redis.call('HINCRBY', TOTALS, name, string.format('%.0f', value - before))
      redis.call('HSET', SOURCES, field, string.format('%.0f', value))
    end
  end
end

-- The first write: when Redis refuses writes (OOM, MISCONF, READONLY), it refuses here, and nothing is half done.
for field, value in pairs(report.fleet) do redis.call('HSET', FLEET, field, value) end

for source, text in pairs(report.rows) do
  local stored = redis.call('HGET', LEDGER, source)
  if stored == text then
    report.row_counters[source] = nil  -- merged when this row was written: most rows of an old fleet never change
  elseif stored and knows_less(cjson.decode(text), stored) then
    report.row_counters[source] = nil
    report.counters[source] = nil
  else
    redis.call('HSET', LEDGER, source, text)
  end
end
for source, counters in pairs(report.row_counters) do merge_counters(source, counters) end
for source, counters in pairs(report.counters) do merge_counters(source, counters) end

replace(GAUGES, report.gauges)
replace(WORKERS, report.workers)
replace(POLICIES, report.policies)
if report.metric_sums then  -- known
  replace(METRICS, report.metrics)
  replace(METRIC_SUMS, report.metric_sums)
end
local held = tonumber(redis.call('HGET', LEASE, 'epoch') or '0') or 0
if report.lease.epoch and tonumber(report.lease.epoch) >= held then replace(LEASE, report.lease) end
for slot, incarnation in pairs(report.incarnations) do
  local highest = tonumber(redis.call('HGET', INCARNATIONS, slot) or '0') or 0
  if incarnation > highest then redis.call('HSET', INCARNATIONS, slot, string.format('%.0f', incarnation)) end
end

for slot, text in pairs(report.runner_state) do redis.call('HSET', RUNNER_STATE, slot, text) end

local seen = 0
if redis.call('HGET', FLEET, 'event_source') == report.event_source then
  seen = tonumber(redis.call('HGET', FLEET, 'event_number') or '0') or 0
end
for _, event in ipairs(report.events) do
  if event.number > seen then
    redis.call('XADD', EVENTS, 'MAXLEN', '~', '1000', '*', unpack(event.fields))
    seen = event.number
  end
end
redis.call('HSET', FLEET, 'event_source', report.event_source, 'event_number', string.format('%.0f', seen))
return skipped
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
