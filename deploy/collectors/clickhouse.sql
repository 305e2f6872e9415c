-- The table that vector.yaml writes to: the columns of `logs` in factory/rows.py.
CREATE DATABASE IF NOT EXISTS headrace;
CREATE TABLE IF NOT EXISTS headrace.logs (
    ts DateTime64(6, 'UTC'),
    service LowCardinality(String),
    level LowCardinality(String),
    logger LowCardinality(String),
    message String,
    pid UInt32,
    request_id String,
    trace_id String,
    span_id String,
    error String,
    stack String,
    path LowCardinality(String),
    status Nullable(UInt16),
    seconds Nullable(Float64),
    fields String,
    INDEX by_request request_id TYPE bloom_filter GRANULARITY 4
) ENGINE = MergeTree
PARTITION BY toDate(ts)
ORDER BY (service, level, ts)
TTL toDateTime(ts) + INTERVAL 30 DAY;
